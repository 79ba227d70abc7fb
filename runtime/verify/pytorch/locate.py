"""Which result of a plan differs first from what one device computes.

The program gets probes, and so does one for a single device; both run forward and backward on one
batch in float64. The plan's own program is emitted again with a probe behind every op. One that was
edited is taken as it stands, with a probe behind each statement that the plan knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.emit.marks import instrumented
from autopar.files import plan_folder
from autopar.frontends.pytorch import capture
from autopar.lowering.of_plan import planned_graph
from autopar.nouns.axes import PIPELINE
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, Stage
from autopar.nouns.recompute import KEEP_ALL
from autopar.nouns.workload import Workload
from autopar.pipeline.actions import Lists
from autopar.runtime.pytorch import program
from autopar.runtime.pytorch.batches import Batch
from autopar.runtime.pytorch.initialize import initialize
from autopar.runtime.pytorch.probe import recording
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.shared.edits import edits_of, program_of
from autopar.runtime.shared.program_module import read_lists, run_program
from autopar.runtime.shared.seen import Seen
from autopar.runtime.verify.differences import Places, describe_first, places_of
from autopar.runtime.verify.pytorch.modes import exact

PROBE = "autopar.runtime.pytorch.probe.probe"


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
    lists: Lists = ()


def probed(folder: str | Path, workload: Workload) -> Probed:
    """Both programs with probes. Raises what capturing, lowering and emitting raise."""
    plan = plan_folder.read_plan(folder)
    captured = capture(workload)
    stages = tuple(replace(stage, recompute=KEEP_ALL) for stage in plan.stages)
    spread = replace(plan, stages=stages, precision="float32")
    alone = (Spread(Mesh((), ())),)
    single = replace(
        spread,
        spreads=alone,
        stages=(Stage(),),
        microbatches=1,
        seq_slices=None,
        expert_placement={},
    )
    single_text = program_of(single, captured, probes=True)
    changed = edits_of(folder, plan, captured)
    if changed:
        own_text = plan_folder.code_of(folder, plan_folder.MODEL).read_text()
        spread_text = instrumented(own_text, program_of(plan, captured, marks=True), PROBE)
    else:
        spread_text = program_of(spread, captured, probes=True)
    places = places_of(planned_graph(plan, captured.graph))
    return Probed(spread_text, single_text, places, changed, read_lists(folder, plan))


def locate(texts: Probed, workload: Workload, batch: Batch, device: torch.device) -> str:
    """One sentence on the first result that differs; all ranks call it, rank 0 gets the answer."""
    lists = texts.lists
    actual = _record(texts.spread, workload, batch, device, False, lists)
    program_ = Program.of(run_program(texts.spread), lists)
    mesh = Mesh(tuple(program_.mesh), tuple(program_.mesh.values())).trimmed()
    every: list[Any] = [actual]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, actual)
    if dist.is_initialized() and dist.get_rank() != 0:
        return ""
    alone = _record(texts.single, workload, batch, device, True)
    settings = program_.settings
    every, mesh = _without_pipeline(every, mesh)
    times = settings.microbatches, settings.seq_slices
    return describe_first([alone], every, mesh, *times, texts.places, texts.changed)


def _without_pipeline(ranks: Sequence[Sequence[Seen]], mesh: Mesh) -> tuple[list[list[Seen]], Mesh]:
    """What all places on ``pp`` recorded as if one rank had: ``pp`` is the outermost axis.

    What several stages make for themselves counts where it comes first.
    """
    if mesh.size(PIPELINE) == 1:
        return [list(seen) for seen in ranks], mesh
    inner = Mesh(mesh.axes[1:], mesh.sizes[1:])
    results: list[list[Seen]] = []
    for place in range(inner.device_count):
        own: list[Seen] = []
        for seen in ranks[place :: inner.device_count]:
            known = {one.name for one in own}
            own += [one for one in seen if one.name not in known]
        results.append(own)
    return results, inner


def _record(
    text: str,
    workload: Workload,
    batch: Batch,
    device: torch.device,
    alone: bool,
    lists: Lists = (),
) -> list[Seen]:
    assert workload.model is not None
    make = workload.model
    before = program.FP32, program.recompute
    # recomputing would call every probe twice
    program.FP32, program.recompute = torch.float64, _once
    try:
        made = Program.of(run_program(text), lists)
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


def _once(function: Callable[..., Any], *args: Any, **keep: Any) -> Any:
    """What a program calls in place of `autopar.runtime.pytorch.recomputing.recompute`."""
    return function(*args)
