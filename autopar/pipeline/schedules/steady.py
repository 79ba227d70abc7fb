"""A step of many microbatches from two of few: past the fill a schedule repeats itself.

What a schedule takes is a maximum over paths of sums of costs, so with costs that stay the same it
grows by the same for every further turn of microbatches once no other path can become the longest
(the cycle time of a max-plus linear system: Baccelli et al. 1992, chapter 3). No rank can grow by
less than it computes, so of that and the growth seen in a short run the larger is taken. It is an
estimate from either side: where the fill of a schedule depends on how many microbatches there are,
as that of eager 1F1B does, a short run may grow faster than a long one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autopar.pipeline.actions import Schedule
from autopar.pipeline.clock import Clock, Pair, Table, Times
from autopar.pipeline.schedules.table import SCHEDULES, kind_of, schedule

ROUNDS = 4
"""Microbatches played, in turns through all ranks: of every named schedule with stages 30 % apart
the step is then within 1.5 % of that of all microbatches (`tests/pipeline/test_steady.py`)."""


class SteadyClock:
    """`autopar.pipeline.clock.Clock` of a named schedule, whatever the number of microbatches."""

    def __init__(self, name: str, pp: int, microbatches: int, interleave: int = 1) -> None:
        """Raises `ScheduleError` as `kind_of` does; of a schedule that passes microbatches in turns
        through all ranks, numbers between two turns are taken as lying between them."""
        kind = SCHEDULES[name]
        turn = pp if kind.turns else 1
        kind_of(name, pp, -(-microbatches // turn) * turn, interleave)
        self.microbatches = microbatches
        most = max(ROUNDS * pp, kind.least(pp) + pp)
        whole = microbatches <= most and microbatches % turn == 0
        few = microbatches if whole else min(most, max(1, microbatches // turn) * turn)
        self._few = _clock(name, pp, few, interleave)
        self._fewer = None
        if not whole:
            less = few + turn if few == turn else few - pp
            self._fewer = _clock(name, pp, less, interleave)

    @property
    def schedule(self) -> Schedule:
        """The one that is played: of no more microbatches than `ROUNDS` turns."""
        return self._few.schedule

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return self._few.pairs

    def peaks(self, saved: Table, pending: Table | None = None) -> Table:
        """As `Clock.peaks`; right where no rank holds more the more microbatches there are."""
        return self._few.peaks(saved, pending)

    def times(self, actions_s: Table, sends_s: Table, reduce_s: Table) -> Times:
        """As `Clock.times`, of all microbatches."""
        few = self._few.times(actions_s, sends_s, reduce_s)
        if self._fewer is None:
            return few
        fewer = self._fewer.times(actions_s, sends_s, reduce_s)
        played = self._few.schedule.microbatches
        apart = played - self._fewer.schedule.microbatches
        busy_s = (few.busy_s - fewer.busy_s) / apart
        grows_s = np.maximum((few.step_s - fewer.step_s) / apart, busy_s.max(axis=0))
        more = self.microbatches - played
        return Times(
            few.step_s + more * grows_s, few.busy_s + more * busy_s, few.active_s + more * grows_s
        )


@lru_cache(maxsize=256)
def _clock(name: str, pp: int, microbatches: int, interleave: int) -> Clock:
    return Clock(schedule(name, pp, microbatches, interleave))
