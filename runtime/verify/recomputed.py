"""What the blocks of a program recompute beside what its plan says of each stage.

Gradients are the same whatever runs again, and so are the collectives of many plans; time and
memory are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan
from autopar.nouns.recompute import NONE, POLICIES
from autopar.pipeline.schedules.of_plan import schedule_of


def differences(plan: Plan, graph: Graph, place: int, seen: Mapping[str, int]) -> list[str]:
    """One line for each policy of which a step of the rank at ``place`` on ``pp`` has other calls
    of blocks than planned. ``seen``: as `autopar.runtime.pytorch.recomputing.recomputations`."""
    calls = _calls(plan, graph)
    planned: Counter[str] = Counter()
    stages = [*_stages(plan, place)]
    for number, passes in stages:
        for policy in plan.stages[number].recompute.by_call(calls[number]):
            planned[policy] += passes
    says = " and ".join(dict.fromkeys(str(plan.stages[number].recompute) for number, _ in stages))
    return [
        f"pipeline rank {place} makes {seen.get(policy, 0)} calls of blocks a step that recompute "
        f"{policy}, planned {planned[policy]}: its plan says {says}"
        for policy in POLICIES
        if policy != NONE and seen.get(policy, 0) != planned[policy]
    ]


def _calls(plan: Plan, graph: Graph) -> Counter[int]:
    """Calls of blocks in each stage."""
    firsts = {stage.first: number for number, stage in enumerate(plan.stages)}
    calls: Counter[int] = Counter()
    now = 0
    for op in graph.ops:
        now = firsts.get(op.name, now)
        calls[now] += "block" in op.attrs
    return calls


def _stages(plan: Plan, place: int) -> Iterator[tuple[int, int]]:
    """(stage, passes a step) of what the rank runs."""
    if len(plan.stages) == 1:
        yield 0, plan.passes
        return
    schedule = schedule_of(plan)
    passes = Counter(action.stage for action in schedule.lists[place] if action.kind == "F")
    for stage, count in passes.items():
        yield schedule.part[stage], count
