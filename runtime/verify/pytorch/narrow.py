"""Layers in 8 bits, emulated in float64: on a plan's ranks, and on one in the same pieces."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.files import plan_folder
from autopar.frontends.pytorch import capture
from autopar.nouns.axes import SAMPLES
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Spread, Stage
from autopar.nouns.workload import Workload
from autopar.rules.batch import batch_flow
from autopar.runtime.pytorch import program
from autopar.runtime.pytorch.initialize import initialize
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.scaled_products import Seen, products_as
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.shared.edits import program_of
from autopar.runtime.shared.program_module import run_program
from autopar.runtime.verify.narrow import NarrowResult
from autopar.runtime.verify.pytorch.comparison import Comparison
from autopar.runtime.verify.pytorch.modes import exact
from autopar.runtime.verify.pytorch.reference import Reference
from autopar.runtime.verify.pytorch.steps import gather, gradient_pieces
from autopar.runtime.verify.pytorch.trainers import make_trainer, recorded_once


def narrow_result(
    folder: Path,
    workload: Workload,
    batch: Mapping[str, Any],
    device: torch.device,
    wanted: Reference | None,
    seen: Seen,
) -> NarrowResult | None:
    """What rank 0 says of the plan's layers in 8 bits; None on others, and of plans without such.
    All ranks call it.

    wanted: the model's own reference, on rank 0. seen: what products gave in the program's own
    precision.
    """
    plan = plan_folder.read_plan(folder)
    if not plan.recipes:
        return None
    trainer = make_trainer(folder, workload, device, torch.float64, recorded_once(folder))
    product = _largest(seen.error)
    with exact(), products_as("emulated"):
        loss = float(trainer.backward(batch))
    pieces = gradient_pieces(trainer)
    right, unchecked = None, ""
    if wanted is not None:
        right, unchecked = _on_one_device(plan, workload, batch, wanted, trainer.ranks.device)
    comparison = Comparison(right)
    comparison.loss(0, loss)
    gather(pieces, partial(comparison.gradients, 0))
    if wanted is None:
        return None
    errors = comparison.errors()
    return NarrowResult(
        layers=dict(Counter((plan.recipes or {}).values())),
        loss=None if unchecked else errors.loss,
        gradient=None if unchecked else errors.gradient,
        worst_gradient=errors.worst_gradient,
        product=product,
        dtype=plan.precision,
        unchecked=unchecked,
    )


def _largest(error: float) -> float:
    """Over all ranks."""
    if not dist.is_initialized():
        return error
    value = torch.tensor(error, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def _on_one_device(
    plan: Plan,
    workload: Workload,
    batch: Mapping[str, Any],
    model: Reference,
    device: torch.device,
) -> tuple[Reference | None, str]:
    """Loss and gradients of the plan's program for one device, which takes as a microbatch what a
    data rank has of one; or why that cannot be."""
    captured = capture(workload)
    ways = math.prod(plan.mesh(plan.stages[0]).size(axis) for axis in SAMPLES)
    pieces = plan.microbatches * ways
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    if ways > 1 and (against := batch_flow(captured.graph, dims).obstacles):
        return None, f"one device cannot take the samples of data ranks apart: {against[0]}"
    single = replace(
        plan,
        spreads=(Spread(Mesh((), ())),),
        stages=(Stage(),),
        microbatches=pieces,
        seq_slices=None,
        precision="float32",
        schedule="none",
        actions=(),
        loss_chunks=None,
        expert_placement={},
    )
    made = workload.model
    assert made is not None
    before, program.FP32 = program.FP32, torch.float64
    try:
        emitted = Program.of(run_program(program_of(single, captured)))
    finally:
        program.FP32 = before
    alone = Trainer(
        emitted,
        workload,
        lambda targets: initialize(made, workload.seed, targets),
        Ranks(emitted.mesh, device, alone=True),
        lift=torch.float64,
    )
    with exact(), products_as("emulated"):
        loss = float(alone.backward(batch))
    scale = alone.storage.grad_scale
    gradients = {
        model.alias.get(h.name, h.name): h.leaf.grad.detach().cpu() / scale
        for h in alone.held
        if h.leaf.grad is not None
    }
    quiet = {name: 0.0 for name in gradients}
    return replace(model, losses=(loss,), gradients=(gradients,), noise=(quiet,)), ""
