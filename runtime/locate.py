"""Which result of a plan differs first from what one device computes.

Both programs are emitted again with probes, one for the plan and one for a single device, and run
forward and backward on one batch in float64.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar import plan_folder
from autopar.errors import UserError
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Stage, key
from autopar.runtime import program
from autopar.runtime.batches import Batch
from autopar.runtime.initialize import initialize
from autopar.runtime.loading import run_program
from autopar.runtime.probe import Places, Seen, assemble, first_difference, place_of, recording
from autopar.runtime.ranks import Ranks
from autopar.runtime.reference import exact
from autopar.runtime.trainer import Program, Trainer
from autopar.workload import Workload


class EditedProgram(UserError):
    """A program that is not the one that its plan gives."""


def probed(folder: str | Path, workload: Workload) -> tuple[str, str, dict[str, list[str]]]:
    """The plan's program and a single device's, with probes, and where each result comes from.

    Raises `EditedProgram`, and what capturing, lowering and emitting raise.
    """
    from autopar.frontends.pytorch import capture
    from autopar.lowering import lower
    from autopar.rules.batch import data_choices
    from autopar.rules.kept_whole import keep_whole
    from autopar.runtime.emit_torch import emit

    plan = plan_folder.read_plan(folder)
    captured = capture(workload)
    graph = keep_whole(captured.graph, plan.replicated_ops)
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    choices = data_choices(graph, dims)

    def text(stage: Stage, changed: Plan) -> str:
        lowered = lower(graph, stage, changed.microbatches, choices, dims)
        return emit(lowered, changed, captured, probes=True)["model.py"]

    if plan.precision == "float32":  # other precisions are planned on a changed graph
        lowered = lower(graph, plan.stages[0], plan.microbatches, choices, dims)
        file = Path(folder) / plan_folder.PROGRAM / "model.py"
        if emit(lowered, plan, captured)["model.py"] != file.read_text():
            raise EditedProgram(
                f"{file} is not what this version emits for its plan: it was edited or made by "
                "another version; plan again to compare result by result"
            )

    alone = Stage(Mesh((), ()))
    # Recomputing would call every probe twice.
    spread = replace(plan, recompute="none", precision="float32")
    single = replace(spread, stages=(alone,), zero=0, microbatches=1)
    return text(plan.stages[0], spread), text(alone, single), places_of(graph)


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
            "every result and its gradient agrees with the program on one device: what differs is "
            "the reduction of a parameter's gradient or a buffer's update, or both programs differ "
            "from the model in the same way"
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


__all__ = ["locate", "places_of", "probed"]
