"""Figures of every run of units that may be a stage, from a few of them.

Layers repeat, and so do the runs of units that a model may be cut into: embedding and k layers, k
layers, k layers and head. From `KEPT` repeats on one more adds the same to every sum, so a longer
run is the one of `KEPT` and as many times what the last of them added. Time does not grow with
layers. Where a stage gathers parameters for each pass its time bends later, upwards: there this is
from below, and what is chosen is priced in full.

Where units do not repeat, runs of at most `SHORT` are priced, and each longer one is what its two
runs of a unit less have, less what these share; a unit that holds the parameters of an earlier one
of the run adds none of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Run = tuple[int, int]
"""(first unit, the one behind the last)"""

KEPT = 3
PERIODS = 4
"""Units after which a pattern may repeat."""
MANY, SHORT = 120, 2
"""Runs to be priced from which on only those of so few units are."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Which runs are priced, and how all others follow.

    priced: the runs to be priced.
    base:   [units + 1, units + 1] place in ``priced`` of the run that stands for first, end.
    fewer:  twice the same shape: the place of that with one repeat less, at its start and its end.
    times:  how many more repeats there are.
    """

    priced: tuple[Run, ...]
    base: NDArray[np.intp]
    fewer: tuple[NDArray[np.intp], NDArray[np.intp]]
    times: tuple[NDArray[np.intp], NDArray[np.intp]]

    def table(
        self,
        figures: Callable[[int, int], Sequence[float]],
        peaks: Sequence[int] = (),
        of_state: Sequence[int] = (),
        ties: Collection[Run] = (),
    ) -> Table:
        """[figures, units + 1, units + 1] of all runs; 0 where there is none.

        peaks:    figures of which a run has the most of its parts, not their sum.
        of_state: figures of parameters alone, of which a run has each parameter's once.
        ties:     two units of the same parameters, with none of these between them.
        """
        if len(self.priced) > MANY:
            return _grown(figures, len(self.base) - 1, peaks, of_state, frozenset(ties))
        priced = np.array([figures(*run) for run in self.priced])
        values = priced[self.base]
        for fewer, times in zip(self.fewer, self.times, strict=True):
            values += times[..., None] * (priced[self.base] - priced[fewer])
        values[np.tril_indices(len(self.base))] = 0.0
        return np.moveaxis(values, -1, 0)


def _grown(
    figures: Callable[[int, int], Sequence[float]],
    units: int,
    peaks: Sequence[int],
    of_state: Sequence[int],
    ties: Set[Run],
) -> Table:
    values: Table | None = None
    for width in range(1, units + 1):
        first = np.arange(units + 1 - width)
        end = first + width
        if width <= SHORT:
            rows = np.array([figures(int(a), int(b)) for a, b in zip(first, end, strict=True)]).T
            if values is None:
                values = np.zeros((len(rows), units + 1, units + 1))
        else:
            assert values is not None
            head, tail = values[:, first, end - 1], values[:, first + 1, end]
            rows = head + tail - values[:, first + 1, end - 1]
            rows[list(peaks)] = np.maximum(head, tail)[list(peaks)]
            tied = [a for a in first.tolist() if (a, a + width - 1) in ties]
            for figure in of_state:
                rows[figure, tied] -= values[figure, tied, np.array(tied, dtype=int) + 1]
        values[:, first, end] = rows
    assert values is not None
    return values


@lru_cache(maxsize=32)
def runs_of_kinds(kinds: tuple[int, ...]) -> Runs:
    """``kinds``: equal for units that are the same; the first unit is like no other."""
    units = len(kinds)
    text = np.array(kinds, dtype=np.int32)
    onward = [_equal(text, period) for period in range(1, PERIODS + 1)]
    before = [_equal(text[::-1], period)[::-1] for period in range(1, PERIODS + 1)]
    places: dict[bytes, int] = {}
    priced: list[Run] = []

    def place(first: int, end: int) -> int:
        name = (b"" if first else b"0") + text[first:end].tobytes()
        if name not in places:
            places[name] = len(priced)
            priced.append((first, end))
        return places[name]

    base = np.zeros((units + 1, units + 1), dtype=np.intp)
    fewer = (base.copy(), base.copy())
    times = (base.copy(), base.copy())
    for first in range(units):
        for end in range(first + 1, units + 1):
            period, dropped = _repeats(onward, first, end - first) if first else (0, 0)
            start = first + period * dropped
            # The first unit is never left out: what stages behind it make again, it has.
            back, cut = _repeats(before, end - 1, end - max(start, 1))
            last = end - back * cut
            base[first, end] = place(start, last)
            if dropped:
                times[0][first, end] = dropped
                fewer[0][first, end] = place(start + period, last)
            if cut:
                times[1][first, end] = cut
                fewer[1][first, end] = place(start, last - back)
    return Runs(tuple(priced), base, fewer, times)


def _equal(text: NDArray[np.int32], period: int) -> list[int]:
    """From each unit on, how many are what stands ``period`` units behind them."""
    count, lengths = 0, [0] * len(text)
    for i in reversed(range(len(text) - period)):
        count = count + 1 if text[i] == text[i + period] else 0
        lengths[i] = count
    return lengths


def _repeats(equal: list[list[int]], at: int, units: int) -> tuple[int, int]:
    """The shortest pattern that stands more than `KEPT` times at an end of a run of ``units``, and
    how many more."""
    for period, same in enumerate(equal, 1):
        repeats = min(same[at] + period, units) // period
        if repeats > KEPT:
            return period, repeats - KEPT
    return 0, 0
