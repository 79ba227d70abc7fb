"""Experts over ranks, as many on each, so that the rank with most rows has as few as can be.

The heaviest first, each to the rank that has least and still has room: the longest processing time
first (Graham 1969, "Bounds on multiprocessing timing anomalies") with equal counts, as
`balanced_packing` of DeepSeek's EPLB packs experts (github.com/deepseek-ai/EPLB, eplb.py). Then two
experts change places between the busiest rank and another as long as that leaves both below what
the busiest has. FasterMoE (He et al. 2022), SmartMoE (Zhai et al. 2023) and Prophet (Wang et al.
2023) go by what was routed before likewise; copies of busy experts, which FasterMoE and Prophet
make, are not made here.

Exact it is not: the smallest cases, against all assignments, are in the tests.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache

from autopar.nouns.expert_placement import busiest_over_mean

CLOSE = 1e-3
"""Of a rank's mean: what the busiest may have above it without that anything is moved."""


@lru_cache(maxsize=4096)  # a search asks for one layer on many meshes
def by_load(loads: tuple[float, ...], ranks: int) -> tuple[int, ...]:
    """The expert at each place (`autopar.nouns.expert_placement`); in order where no other
    assignment that is seen leaves the busiest rank less.

    loads: rows of each expert, 0 or more, as many experts as ``ranks`` divides.
    """
    natural = tuple(range(len(loads)))
    if ranks == 1 or ranks == len(loads) or not sum(loads):
        return natural
    held = _longest_first(loads, ranks)
    while _exchange(held, loads):
        pass
    ordered = sorted(sorted(own) for own in held)
    made = tuple(expert for own in ordered for expert in own)
    before, after = (busiest_over_mean(loads, order, ranks) for order in (natural, made))
    return made if after < before else natural


def _longest_first(loads: Sequence[float], ranks: int) -> list[list[int]]:
    """Experts of each rank."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks)]
    for expert in sorted(range(len(loads)), key=lambda e: (-loads[e], e)):
        total, rank = heapq.heappop(least)
        held[rank].append(expert)
        if len(held[rank]) * ranks < len(loads):
            heapq.heappush(least, (total + loads[expert], rank))
    return held


def _exchange(held: list[list[int]], loads: Sequence[float]) -> bool:
    """Whether an expert of the busiest rank changed places with one of another, so that the more of
    both is the least that one exchange gives."""
    totals = [sum(loads[e] for e in own) for own in held]
    busiest = max(range(len(held)), key=lambda r: (totals[r], -r))
    if totals[busiest] <= (1 + CLOSE) * sum(totals) / len(held):
        return False
    best = min(_offers(held, loads, totals, busiest), default=None)
    if best is None or best[0] >= totals[busiest] * (1 - 1e-12):
        return False
    _, mine, other, theirs = best
    held[busiest][held[busiest].index(mine)] = theirs
    held[other][held[other].index(theirs)] = mine
    return True


def _offers(
    held: Sequence[Sequence[int]], loads: Sequence[float], totals: Sequence[float], busiest: int
) -> Iterator[tuple[float, int, int, int]]:
    """(what the more of both ranks has then, expert that goes, the other rank, expert that comes):
    for each expert of the busiest and each other rank the two that come closest to evening both."""
    for other, own in enumerate(held):
        if other == busiest:
            continue
        ordered = sorted(own, key=lambda e: (loads[e], e))
        there = [loads[e] for e in ordered]
        for mine in held[busiest]:
            wanted = loads[mine] - (totals[busiest] - totals[other]) / 2
            at = bisect_left(there, wanted)
            for theirs in ordered[max(at - 1, 0) : at + 1]:
                moved = loads[mine] - loads[theirs]
                most = max(totals[busiest] - moved, totals[other] + moved)
                yield most, mine, other, theirs
