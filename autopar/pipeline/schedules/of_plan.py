"""The schedule of a plan: that of its name, or the actions that stand in it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from autopar.nouns.plan import Plan
from autopar.pipeline.actions import Lists, Schedule, from_text, one_route
from autopar.pipeline.check import check
from autopar.pipeline.schedules.table import SCHEDULES, schedule


def schedule_of(plan: Plan) -> Schedule:
    """Raises `ScheduleError` where the plan's stages and microbatches cannot be ordered so."""
    groups, slices = plan.groups, plan.seq_slices or 1
    if plan.actions:
        ranks = tuple(groups.index(stage.device) for stage in plan.stages)
        lists = from_text("\n".join(plan.actions))
        return one_route(plan.schedule, ranks, lists, plan.passes, slices)
    return _named(plan.schedule, len(groups), plan.passes, len(plan.stages), slices)


@lru_cache(maxsize=64)
def _named(name: str, pp: int, microbatches: int, stages: int, slices: int) -> Schedule:
    each = SCHEDULES[name].stages if name in SCHEDULES else 1
    return schedule(name, pp, microbatches, max(1, stages // (pp * each)), slices)


def lists_of(plan: Plan, text: str) -> Lists:
    """The actions of each pipeline rank as ``text`` has them, for the plan's stages.

    Raises `ScheduleError` for what cannot be read, is not complete, or waits in a circle.
    """
    played = replace(schedule_of(plan), lists=from_text(text))
    check(played)
    return played.lists
