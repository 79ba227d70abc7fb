"""The schedule of a plan: that of its name, or the actions that stand in it."""

from __future__ import annotations

from functools import lru_cache

from autopar.nouns.plan import Plan
from autopar.pipeline.actions import Lists, Schedule, from_text, one_route
from autopar.pipeline.schedules.table import SCHEDULES, schedule


def schedule_of(plan: Plan) -> Schedule:
    """Raises `ScheduleError` where the plan's stages and microbatches cannot be ordered so."""
    groups = plan.groups
    if plan.actions:
        ranks = tuple(groups.index(stage.device) for stage in plan.stages)
        lists = from_text("\n".join(plan.actions))
        return one_route(plan.schedule, ranks, lists, plan.microbatches)
    return _named(plan.schedule, len(groups), plan.microbatches, len(plan.stages))


@lru_cache(maxsize=64)
def _named(name: str, pp: int, microbatches: int, stages: int) -> Schedule:
    each = SCHEDULES[name].stages if name in SCHEDULES else 1
    return schedule(name, pp, microbatches, max(1, stages // (pp * each)))


def lists_of(plan: Plan) -> Lists:
    """The actions of each pipeline rank, in order; none for a plan of one stage."""
    return schedule_of(plan).lists if len(plan.stages) > 1 else ()
