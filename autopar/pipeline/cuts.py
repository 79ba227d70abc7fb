"""Where a chain of units is cut into stages: exact, under a bound on the slowest stage.

A step of m microbatches through S stages takes in GPipe exactly, and in 1F1B at most,

    step = sum over stages of fill_s  +  (m - 1) * max over stages of busy_s

(Fan et al. 2021, eq. 2), where ``busy_s`` is what a stage computes for
one microbatch and ``fill_s`` that with its sends, which the first microbatch waits for. For a bound
b on ``busy_s``, a chain of least ``sum fill`` is a shortest path with S edges, found by dynamic
programming over (stages, units); the least b that any chain keeps is found by bisection, where
longer runs take longer by stages as long as they may be (Pinar & Aykanat 2004), and b is swept
upwards from there. With f(b) that least sum, no bound above b can give less than
f(infinity) + (m - 1) b: the sweep ends where that is not below the best found, so the answer is the
optimum. A bound leaves runs of few units, so a program looks at units x the widest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.nouns.errors import DoesNotFit

Table = NDArray[np.float64]
Mask = NDArray[np.bool_]

SAME = 1e-9
"""Share of the largest stage by which sums of times may differ in their last digits."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """``ends``: the unit behind the last one of every stage; ``bounds_tried`` dynamic programs."""

    ends: tuple[int, ...]
    step_s: float
    bounds_tried: int


class NoCuts(DoesNotFit):
    """No way to cut the chain into that many stages fits the devices."""


def cut(
    busy: Sequence[Table],
    fill: Sequence[Table],
    microbatches: int,
    allowed: Sequence[Mask] | None = None,
) -> Cuts:
    """The fastest cut of a chain into stages, none of them empty.

    busy, fill: of every stage [units + 1, units + 1] seconds of one microbatch on units ``first``
                to ``end - 1``: compute, and that with its sends.
    allowed:    of every stage which runs fit the device at its place; None: all.

    Raises:
        NoCuts: more stages than units, or no cut whose stages are all allowed.
    """
    units, stages = len(busy[0]) - 1, len(busy)
    if stages > units:
        raise NoCuts(
            f"{stages} stages of {units} units that a model can be cut between: take at most "
            f"{units} stages"
        )
    chain = _Chain(busy, fill, allowed)
    free = chain.least_fill(np.inf)
    if free is None:
        raise NoCuts(
            f"no cut of {units} units into {stages} stages fits: for every cut some stage has no "
            "layout that its device holds; take more stages, recompute, or split more state"
        )
    own = {id(table): table for table in busy}.values()
    runs = np.concatenate([table[np.triu_indices(units + 1, 1)] for table in own])
    digit = max(float(runs.max()) * SAME, np.finfo(float).tiny)
    bounds = np.unique(np.ceil(runs / digit)) * digit
    low, high = 0, len(bounds) - 1
    while low < high:  # the least bound that any chain keeps
        middle = (low + high) // 2
        if not chain.keeps(bounds[middle]):
            low = middle + 1
        else:
            high = middle
    best, ends = np.inf, free[1]
    steady = microbatches - 1
    place = low
    while place < len(bounds) and free[0] + steady * (bounds[place] - digit) < best:
        least = chain.least_fill(bounds[place])
        assert least is not None
        total, chosen = least
        runs_of = zip(busy, (0, *chosen), chosen, strict=False)
        slowest = max(table[a, b] for table, a, b in runs_of)
        if total + steady * slowest < best:
            best, ends = total + steady * slowest, chosen
        if total <= free[0]:
            break  # a larger bound gives no less
        place += 1
    return Cuts(ends, float(best), chain.tried)


class _Chain:
    """Tables as bands: [end, width - 1] of the run of ``width`` units before ``end``."""

    def __init__(
        self, busy: Sequence[Table], fill: Sequence[Table], allowed: Sequence[Mask] | None
    ) -> None:
        self.units, self.stages, self.tried = len(busy[0]) - 1, len(busy), 0
        widest = self.units - self.stages + 1
        ends = np.arange(self.units + 1)[:, None]
        first = ends - np.arange(1, widest + 1)[None, :]
        there = first >= 0
        first = np.maximum(first, 0)
        masks = allowed or [there] * self.stages
        # Stages of equal tables share one place in each of these.
        kinds: dict[tuple[int, ...], int] = {}
        busy_of: list[Table] = []
        fill_of: list[Table] = []
        kind = []
        for tables in zip(busy, fill, masks, strict=True):
            key = tuple(map(id, tables))
            if key not in kinds:
                kinds[key] = len(kinds)
                one, filled, mask = tables
                allows = there & mask[first, ends] if allowed else there
                busy_of.append(np.where(allows, one[first, ends], np.inf))
                fill_of.append(np.where(allows, filled[first, ends], np.inf))
            kind.append(kinds[key])
        self.busy, self.fill = np.stack(busy_of), np.stack(fill_of)
        self.kind = np.array(kind, dtype=np.intp)
        self.onward = self._onward(busy, masks if allowed else None)

    def _onward(self, busy: Sequence[Table], masks: Sequence[Mask] | None) -> Table | None:
        """[first, end] of the one table of all stages, infinite where no stage may be; None: there
        are several, or a longer run may take less."""
        if len({*map(id, busy)}) > 1 or (masks and len({*map(id, masks)}) > 1):
            return None
        there = np.triu(np.ones_like(busy[0], dtype=bool), 1)
        onward = np.where(there & masks[0] if masks else there, busy[0], np.inf)
        later, wider = onward[1:] <= onward[:-1], onward[:, 1:] >= onward[:, :-1]
        grows = np.all(later | ~there[1:]) and np.all(wider | ~there[:, :-1])
        return onward if grows else None

    def keeps(self, bound: float) -> bool:
        """Whether any chain keeps the bound."""
        if self.onward is None:
            return self.least_fill(bound) is not None
        units, at = np.count_nonzero(self.onward <= bound, axis=1).tolist(), 0
        for _ in range(self.stages):
            at += units[at]
        return bool(at == self.units)

    def least_fill(self, bound: float) -> tuple[float, tuple[int, ...]] | None:
        """The chain of least ``sum fill`` among those that keep the bound, and its ends."""
        from autopar.pipeline import kernels

        self.tried += 1
        total, ends = kernels.least_fill(self.busy, self.fill, self.kind, float(bound))
        return (float(total), tuple(ends.tolist())) if np.isfinite(total) else None
