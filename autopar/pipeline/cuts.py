"""Where a chain of units is cut into stages: exact, under a bound on the slowest stage.

A step of m microbatches through S stages takes in GPipe exactly, and in 1F1B at most,

    step = sum over stages of fill_s  +  (m - 1) * max over stages of busy_s

(Fan et al. 2021, eq. 2), where ``busy_s`` is what a stage computes for
one microbatch and ``fill_s`` that with its sends, which the first microbatch waits for. For a bound
b on ``busy_s``, a chain of least ``sum fill`` is a shortest path with S edges, found by dynamic
programming over (stages, units); the least b that any chain keeps is found by bisection, and b is
swept upwards from there. With f(b) that least sum, no bound above b can give less than
f(infinity) + (m - 1) b: the sweep ends where that is not below the best found, so the answer is the
optimum. Each stage is priced by its place as well, since what it must hold for backward follows
from that; a stage that does not fit its device has no price.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.nouns.errors import DoesNotFit

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StagePrice:
    """Seconds of one microbatch on one stage: ``busy_s`` its compute, ``fill_s`` with its sends."""

    busy_s: float
    fill_s: float


Price = Callable[[int, int, int], StagePrice | None]
"""``price(stage, first, end)`` of units ``first`` to ``end - 1``; None where they do not fit."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """``ends``: the unit behind the last one of every stage; ``bounds_tried`` dynamic programs."""

    ends: tuple[int, ...]
    step_s: float
    bounds_tried: int


class NoCuts(DoesNotFit):
    """No way to cut the chain into that many stages fits the devices."""


def cut(units: int, stages: int, microbatches: int, price: Price) -> Cuts:
    """The fastest cut of ``units`` into ``stages``, none of them empty.

    Raises:
        NoCuts: more stages than units, or no cut whose stages all have a price.
    """
    if stages > units:
        raise NoCuts(
            f"{stages} stages of {units} units that a model can be cut between: take at most "
            f"{units} stages"
        )
    busy, fill = _tables(units, stages, price)
    bounds = np.unique(busy[np.isfinite(busy)])
    free = _least_fill(busy, fill, np.inf)
    tried = 1
    if free is None:
        raise NoCuts(
            f"no cut of {units} units into {stages} stages fits: for every cut some stage has no "
            "layout that its device holds; take more stages, recompute, or split more state"
        )
    least_fill = free[0]
    low, high = 0, len(bounds) - 1
    while low < high:  # the least bound that any chain keeps
        middle = (low + high) // 2
        tried += 1
        if _least_fill(busy, fill, bounds[middle]) is None:
            low = middle + 1
        else:
            high = middle
    best, ends = np.inf, free[1]
    steady = microbatches - 1
    place = low
    while place < len(bounds) and least_fill + steady * bounds[place] < best:
        found = _least_fill(busy, fill, bounds[place])
        tried += 1
        assert found is not None
        total, chosen = found
        slowest = max(busy[s, a, b] for s, (a, b) in enumerate(_stages(chosen)))
        if total + steady * slowest < best:
            best, ends = total + steady * slowest, chosen
        place += 1
    return Cuts(ends, float(best), tried)


def _stages(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))


def _tables(units: int, stages: int, price: Price) -> tuple[Table, Table]:
    """busy and fill [stage, first, end]; infinite where a stage does not fit or leaves too few."""
    busy = np.full((stages, units + 1, units + 1), np.inf)
    fill = busy.copy()
    for stage in range(stages):
        # Every stage before and behind has at least one unit; the ends of the chain are fixed.
        firsts = [0] if stage == 0 else range(stage, units - (stages - 1 - stage))
        for first in firsts:
            last = units - (stages - 1 - stage)
            ends = [units] if stage == stages - 1 else range(first + 1, last + 1)
            for end in ends:
                found = price(stage, first, end)
                if found is not None:
                    busy[stage, first, end] = found.busy_s
                    fill[stage, first, end] = found.fill_s
    return busy, fill


def _least_fill(busy: Table, fill: Table, bound: float) -> tuple[float, tuple[int, ...]] | None:
    """The chain of least ``sum fill`` among those that keep the bound, and its ends."""
    stages, size, _ = fill.shape
    reach = np.full(size, np.inf)
    reach[0] = 0.0
    came: list[NDArray[np.intp]] = []
    for stage in range(stages):
        through = reach[:, None] + np.where(busy[stage] <= bound, fill[stage], np.inf)
        came.append(through.argmin(axis=0))
        reach = through.min(axis=0)
    if not np.isfinite(reach[-1]):
        return None
    ends, at = [], size - 1
    for stage in reversed(range(stages)):
        ends.append(at)
        at = int(came[stage][at])
    return float(reach[-1]), tuple(reversed(ends))
