"""Which result of a plan differs first from what one device computes.

Both programs are emitted again with probes, one for the plan and one for a single device, and run
forward and backward on one batch in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar import plan_folder
from autopar.errors import UserError
from autopar.frontends.captured import Captured
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Stage, key
from autopar.precision import at_precision
from autopar.runtime import program
from autopar.runtime.batches import Batch
from autopar.runtime.edits import told
from autopar.runtime.initialize import initialize
from autopar.runtime.loading import run_program
from autopar.runtime.probe import Places, Seen, assemble, first_difference, place_of, recording
from autopar.runtime.ranks import Ranks
from autopar.runtime.reference import exact
from autopar.runtime.trainer import Program, Trainer
from autopar.workload import Workload


class EditedProgram(UserError):
    """A program that is not the one that its plan gives."""


@dataclass(frozen=True, slots=True)
class _Emitter:
    """Emits a model again for any plan of it."""

    captured: Captured
    graph: Graph

    @staticmethod
    def of(workload: Workload, plan: Plan) -> _Emitter:
        from autopar.frontends.pytorch import capture
        from autopar.rules.kept_whole import keep_whole

        captured = capture(workload)
        return _Emitter(captured, keep_whole(captured.graph, plan.replicated_ops))

    def __call__(self, plan: Plan, probes: bool = False) -> str:
        from autopar.lowering import lower
        from autopar.rules.batch import data_choices
        from autopar.runtime.emit_torch import emit

        graph = at_precision(self.graph, plan.precision)
        dims = {e.name: e.batch_dim for e in self.captured.batch if e.batch_dim is not None}
        choices = data_choices(graph, dims)
        lowered = lower(graph, plan.stages[0], plan.microbatches, choices, dims)
        return emit(lowered, plan, self.captured, probes=probes)["model.py"]


def edited(folder: str | Path, workload: Workload) -> str:
    """What sets the program in ``folder`` apart from its plan's; empty: nothing.

    Raises what capturing, lowering and emitting raise.
    """
    plan = plan_folder.read_plan(folder)
    return told(folder, _Emitter.of(workload, plan)(plan))


def probed(folder: str | Path, workload: Workload) -> tuple[str, str, dict[str, list[str]]]:
    """The plan's program and a single device's, with probes, and where each result comes from.

    Raises `EditedProgram`, and what capturing, lowering and emitting raise.
    """
    plan = plan_folder.read_plan(folder)
    emitted = _Emitter.of(workload, plan)
    changed = told(folder, emitted(plan))
    if changed:
        raise EditedProgram(changed)
    # Recomputing would call every probe twice.
    spread = replace(plan, recompute="none", precision="float32")
    single = replace(spread, stages=(Stage(Mesh((), ())),), zero=0, microbatches=1)
    return emitted(spread, True), emitted(single, True), places_of(emitted.graph)


def places_of(graph: Graph) -> dict[str, list[str]]:
    """Result name -> module path and source line of its op, by occurrence."""
    found: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in op.outputs:
            found[key(None, name)] = [str(op.source)]
    for block in graph.blocks.values():
        for op in block.body.ops:
            for name in op.outputs:
                inside = op.source.module
                found[key(block.name, name)] = [
                    f"{instance}.{inside} ({op.source.file}:{op.source.line})".replace(". (", " (")
                    for instance in block.instances
                ]
    return found


def locate(
    spread: str, single: str, places: Places, workload: Workload, batch: Batch, device: torch.device
) -> str:
    """One sentence on the first result that differs; all ranks call it, rank 0 gets the answer.

    ``spread`` and ``single`` are the texts of the two programs; the mesh is that of ``spread``.
    """
    found = _record(spread, workload, batch, device, alone=False)
    program_ = Program.of(run_program(spread))
    mesh = Mesh(tuple(program_.mesh), tuple(program_.mesh.values())).trimmed()
    every: list[Any] = [found]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
    if dist.is_initialized() and dist.get_rank() != 0:
        return ""
    expected = assemble([_record(single, workload, batch, device, alone=True)], Mesh((), ()), 1)
    whole = assemble(every, mesh, program_.settings.microbatches)
    difference = first_difference(expected, whole)
    if difference is None:
        return (
            "first difference: in no result and no gradient of one, so in what a parameter's "
            "gradient is reduced to, in a buffer's update, or in the same way on one device too "
            "(the worst parameters stand above); plans with other pins, such as --fix tp=1 or "
            "zero=0, show which axis it comes with"
        )
    return difference.text(place_of(places, difference))


def _record(
    text: str, workload: Workload, batch: Batch, device: torch.device, alone: bool
) -> list[Seen]:
    assert workload.model is not None
    make = workload.model
    before = program.FP32
    program.FP32 = torch.float64
    try:
        made = Program.of(run_program(text))
    finally:
        program.FP32 = before
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


__all__ = ["EditedProgram", "edited", "locate", "places_of", "probed"]
