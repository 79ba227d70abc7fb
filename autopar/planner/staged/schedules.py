"""Under which schedules, depths and recomputation a shape of pipelines is tried."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.table import SCHEDULES, kind_of
from autopar.planner.ask.question import Question
from autopar.planner.staged.found import FOUND, NAMED, VEE, limits
from autopar.planner.staged.shapes import Core, Shape

USUAL = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
"""Schedules that are tried where none is pinned: by depth of memory and of bubble."""
DEPTHS = (2, 3, 4, 8, 16)
"""Stages a rank that are tried, one after the other, where a schedule may have several."""


def cores_of(question: Question, shape: Shape) -> Iterator[Core]:
    """Of schedules that may have several stages a rank the one with fewest."""
    pins = question.pins
    for recompute in question.policies if pins.recompute is None else (pins.recompute,):
        for name in USUAL if pins.schedule is None else (pins.schedule,):
            if name == "zb-h1" and recompute.runs_again and pins.schedule is None:
                continue  # backward is whole there, and so this is 1f1b
            if name == FOUND and question.actions is None:
                depths = (pins.interleave,) if pins.interleave else (1, VEE)
                yield from (Core(shape, named, 1, recompute) for named in NAMED)
                for depth in depths:
                    for limit in limits(shape.pp, shape.candidate.passes):
                        yield Core(shape, name, depth, recompute, limit)
                continue
            kind = SCHEDULES.get(name)
            several = kind is not None and kind.interleaves and kind.stages == 1
            depth = pins.interleave or (DEPTHS[0] if several else 1)
            yield Core(shape, name, depth, recompute)


def possible_cores(question: Question, shape: Shape, units: int) -> Iterator[Core]:
    """Those of a model of so many units."""
    return (core for core in cores_of(question, shape) if stages_of(question, core) <= units)


def stages_of(question: Question, core: Core) -> int:
    """Parts that the model is cut into; 0: lists that were given say so."""
    if question.actions is not None:
        return 0
    kind = SCHEDULES.get(core.name)
    return core.shape.pp * core.depth * (1 if kind is None else kind.stages)


def check_core(question: Question, core: Core, units: int) -> None:
    """Raises `ScheduleError` where a model of so many units or the schedule does not allow it."""
    stages, candidate = stages_of(question, core), core.shape.candidate
    if core.name in SCHEDULES:
        kind_of(core.name, core.shape.pp, candidate.passes, core.depth, candidate.slices)
    if stages > units:
        raise ScheduleError(too_many(stages, units))


def too_many(stages: int, units: float) -> str:
    """The refusal of more stages than units."""
    return (
        f"{stages} stages of {units} units that the model can be cut between: take at most {units} "
        "stages"
    )
