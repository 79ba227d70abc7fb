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
from autopar.frontends.pytorch import capture
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Stage, key
from autopar.runtime import program
from autopar.runtime.batches import Batch
from autopar.runtime.edits import program_of, told, transplanted
from autopar.runtime.initialize import initialize
from autopar.runtime.loading import run_program
from autopar.runtime.probe import Places, Seen, assemble, first_difference, place_of, recording
from autopar.runtime.ranks import Ranks
from autopar.runtime.reference import exact
from autopar.runtime.trainer import Program, Trainer
from autopar.workload import Workload


class EditedProgram(UserError):
    """A program that is not the one that its plan gives."""


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
    """Both programs with probes.

    Raises `EditedProgram` where an edit is of what probes break up, and what capturing, lowering
    and emitting raise.
    """
    plan = plan_folder.read_plan(folder)
    captured = capture(workload)
    # Recomputing would call every probe twice.
    spread = replace(plan, recompute="none", precision="float32")
    single = replace(spread, stages=(Stage(Mesh((), ())),), zero=0, microbatches=1)
    spread_text, single_text = (program_of(p, captured, probes=True) for p in (spread, single))
    changed = told(folder, plan, captured)
    if changed:
        program_text = plan_folder.code_of(folder, plan.framework).read_text()
        edited_text = transplanted(program_text, program_of(plan, captured), spread_text)
        if edited_text is None:
            raise EditedProgram(changed)
        spread_text = edited_text
    return Probed(spread_text, single_text, places_of(captured.graph), changed)


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
    expected = assemble([alone], Mesh((), ()), 1)
    whole = assemble(every, mesh, program_.settings.microbatches)
    difference = first_difference(expected, whole)
    changed = f". {texts.changed}" if texts.changed else ""
    if difference is None:
        return (
            "first difference: in no result and no gradient of one, so in what a parameter's "
            "gradient is reduced to, in a buffer's update, or in the same way on one device too "
            "(the worst parameters stand above); plans with other pins, such as --fix tp=1 or "
            f"zero=0, show which axis it comes with{changed}"
        )
    return difference.text(place_of(texts.places, difference)) + changed


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


__all__ = ["EditedProgram", "Probed", "edited", "locate", "places_of", "probed"]
