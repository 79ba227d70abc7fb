"""Of blocks that recompute, as few as memory asks for.

What is between two policies of recomputation in memory is between them in time too
(`autopar.nouns.recompute.Recompute.mixed`), so the fewest blocks that must are the fastest
choice: the knapsack of AdaPipe (Sun et al. 2024) for items that are all alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from autopar.nouns.cluster import Device
from autopar.nouns.recompute import COMPUTE, FULL, Recompute
from autopar.pipeline.actions import Schedule
from autopar.pricing.memory import step_memory
from autopar.pricing.pipeline import Choice, PipelinePrices
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary


def lightest(summary: Summary, state: StateSharding, heavy: str, device: Device) -> Recompute:
    """What fits of a plan of one stage with the fewest blocks that recompute so; all of them must
    fit. ``heavy``: ``compute`` or ``full``."""
    calls = len(summary.calls)
    count = bisect_left(
        range(calls),
        True,
        key=lambda n: step_memory(summary, state, Recompute.mixed(heavy, n, calls), device).fits,
    )
    return Recompute.mixed(heavy, count, calls)


def lightened(
    prices: PipelinePrices,
    choices: Sequence[Choice],
    runs: Sequence[tuple[int, int]],
    schedule: Schedule,
) -> list[Choice]:
    """The choice of every stage, where each rank whose blocks all recompute has as few do so as its
    memory allows. ``runs``: units of every stage of the schedule. Where two ranks have a stage
    each that is one part of the model, they do the same."""
    ranks = range(len(schedule.lists))
    calls = [len(prices.model.stage_summary(*run).calls) for run in runs]
    own = [[i for i in range(len(runs)) if schedule.ranks[i] == rank] for rank in ranks]
    every = [max(calls[i] for i in stages) for stages in own]
    heavy = [all(choices[i].recompute.policy in (COMPUTE, FULL) for i in stages) for stages in own]
    if not any(heavy) or len(schedule.routes) > 1:
        return list(choices)

    def with_first(counts: Sequence[int]) -> list[Choice]:
        """``counts``: of each rank, calls of a stage that recompute; -1: as chosen."""
        return [
            own
            if count < 0
            else own._replace(recompute=Recompute.mixed(own.recompute.policy, count, calls[i]))
            for i, own in enumerate(choices)
            for count in [counts[schedule.ranks[i]]]
        ]

    low = [0 if heavy[rank] else -1 for rank in ranks]
    high = [every[rank] + 1 if heavy[rank] else -1 for rank in ranks]  # as chosen, if nothing else
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        memory = prices.staged(schedule, with_first(middle)).memory(runs, schedule)
        for rank in ranks:
            if low[rank] < high[rank]:
                if memory[rank].fits:
                    high[rank] = middle[rank]
                else:
                    low[rank] = middle[rank] + 1
    return with_first([-1 if high[rank] > every[rank] else high[rank] for rank in ranks])
