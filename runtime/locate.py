"""Which result of a plan differs first from what one device computes.

The program gets probes, and so does one for a single device; both run forward and backward on one
batch in float64. The plan's own program is emitted again with a probe behind every op. One that was
edited is taken as it stands, with a probe behind each statement that the plan knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar import plan_folder
from autopar.frontends.pytorch import capture
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Stage
from autopar.runtime import program
from autopar.runtime.batches import Batch
from autopar.runtime.differences import Places, Seen, places_of, said
from autopar.runtime.edits import program_of, told
from autopar.runtime.initialize import initialize
from autopar.runtime.loading import run_program
from autopar.runtime.marks import instrumented
from autopar.runtime.probe import recording
from autopar.runtime.ranks import Ranks
from autopar.runtime.reference import exact
from autopar.runtime.trainer import Program, Trainer
from autopar.workload import Workload

PROBE = "autopar.runtime.probe.probe"


def edited(folder: str | Path, workload: Workload) -> str:
    """What sets the program in ``folder`` apart from its plan's; empty: nothing.

    Raises what capturing, lowering and emitting raise.
    """
    return told(folder, plan_folder.read_plan(folder), capture(workload))


@dataclass(frozen=True, slots=True)
class Probed:
    """The program in a plan folder and a single device's, with probes.

    places:  where each result comes from.
    changed: what sets the program apart from its plan's; the probed one has it too.
    """

    spread: str
    single: str
    places: Places
    changed: str


def probed(folder: str | Path, workload: Workload) -> Probed:
    """Both programs with probes. Raises what capturing, lowering and emitting raise."""
    plan = plan_folder.read_plan(folder)
    captured = capture(workload)
    spread = replace(plan, recompute="none", precision="float32")
    single = replace(spread, stages=(Stage(Mesh((), ())),), zero=0, microbatches=1)
    single_text = program_of(single, captured, probes=True)
    changed = told(folder, plan, captured)
    if changed:
        own_text = plan_folder.code_of(folder, plan.framework).read_text()
        spread_text = instrumented(own_text, program_of(plan, captured, marks=True), PROBE)
    else:
        spread_text = program_of(spread, captured, probes=True)
    return Probed(spread_text, single_text, places_of(captured.graph), changed)


def locate(texts: Probed, workload: Workload, batch: Batch, device: torch.device) -> str:
    """One sentence on the first result that differs; all ranks call it, rank 0 gets the answer."""
    found = _record(texts.spread, workload, batch, device, alone=False)
    program_ = Program.of(run_program(texts.spread))
    mesh = Mesh(tuple(program_.mesh), tuple(program_.mesh.values())).trimmed()
    every: list[Any] = [found]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
    if dist.is_initialized() and dist.get_rank() != 0:
        return ""
    alone = _record(texts.single, workload, batch, device, alone=True)
    microbatches = program_.settings.microbatches
    return said([alone], every, mesh, microbatches, texts.places, texts.changed)


def _record(
    text: str, workload: Workload, batch: Batch, device: torch.device, alone: bool
) -> list[Seen]:
    assert workload.model is not None
    make = workload.model
    before = program.FP32, program.recompute
    # recomputing would call every probe twice
    program.FP32, program.recompute = torch.float64, _once
    try:
        made = Program.of(run_program(text))
    finally:
        program.FP32, program.recompute = before
    trainer = Trainer(
        made,
        workload,
        lambda targets: initialize(make, workload.seed, targets),
        Ranks(made.mesh, device, alone=alone),
        lift=torch.float64,
    )
    with exact(), recording() as seen:
        trainer.backward(batch)
    for one in seen:
        one.value = one.value.cpu()
        if one.gradient is not None:
            one.gradient = one.gradient.cpu() / trainer.storage.grad_scale
    return seen


def _once(function: Callable[..., Any], *args: Any, keep_collectives: bool = False) -> Any:
    """What a program calls in place of `autopar.runtime.recomputing.recompute`."""
    return function(*args)
