"""Units of a model on a compute stream and a communication stream, one microbatch of them.

Model-axis collectives stand in line with compute. Data-axis traffic runs on the communication
stream: a unit's parameters are gathered while units before it compute, its gradients are reduced
as soon as its backward is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.cost_models.columns import Number, larger, larger_of
from autopar.nouns.prefetch import USUAL

Work = Literal["forward", "backward", "gather", "regather", "reduce"]
Note = Callable[[Work, int, float, float], None]
"""Is given what was played: work, place of the unit, when it starts and ends, in seconds."""


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Seconds of a unit. ``gather_s``, ``regather_s``: of its parameters, before its forward and
    its backward; ``reduce_s``: of its gradients, in every microbatch."""

    forward_s: Number
    backward_s: Number
    gather_s: float
    regather_s: float
    reduce_s: float


@dataclass(slots=True)
class Streams:
    """A compute stream and a communication stream, and when each is done: in seconds, of one
    microbatch's forward and, each time anew, of a backward behind it.

    ``hides``: communication runs beside compute, else each waits for the other. ``ahead``: a unit
    is gathered when the one so many before it starts to compute. Unit 0 is the root, gathered first
    and reduced last.
    """

    units: Sequence[UnitTime]
    gather: bool
    hides: bool
    ahead: int = USUAL
    note: Note | None = None
    computed_s: Number = field(init=False, default=0.0)
    moved_s: Number = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        units = self.units
        gathers = [unit.gather_s for unit in units] if self.gather else []
        computes = [unit.forward_s for unit in units]
        names: tuple[Work, Work] = ("gather", "forward")
        done = self._pass(names, range(len(units)), gathers, computes, ())
        self.computed_s, self.moved_s = done

    def done_s(self, last: Sequence[float] | None = None) -> Number:
        """When all of the microbatch is done.

        last: of the last one, what each unit reduces in it alone. A unit is gathered before what is
        reduced of the one behind which it is.
        """
        back = self.units[::-1]
        gathers = [unit.regather_s for unit in back] if self.gather else []
        reduces = [unit.reduce_s for unit in back]
        if last is not None:
            reduces = [each + own for each, own in zip(reduces, last[::-1], strict=True)]
        computes, turns = [unit.backward_s for unit in back], range(len(back))[::-1]
        done = self._pass(("regather", "backward"), turns, gathers, computes, reduces)
        return larger(*done)

    def _pass(
        self,
        names: tuple[Work, Work],
        places: Sequence[int],
        gathers: Sequence[float],
        computes: Sequence[Number],
        reduces: Sequence[Number],
    ) -> tuple[Number, Number]:
        """Figures of all units in the order of their turns; ``places``: of each."""
        hides, note, most = self.hides, self.note, len(gathers)
        compute, communication = self.computed_s, self.moved_s
        if note is None and not most and not any(reduces):
            for seconds in computes:  # one by one, as below
                compute = compute + seconds
            return compute, communication
        longer = larger_of(compute, communication, *computes)
        if note is None and longer is max:
            return _numbers(hides, self.ahead, (compute, communication), gathers, computes, reduces)
        arrived: list[Number] = []
        for turn, seconds in enumerate(computes):
            for issued in range(len(arrived), min(turn + self.ahead + 1, most)):
                taken = gathers[issued]
                done: Number = 0.0
                if taken and hides:
                    start = compute if issued == turn else longer(compute, arrived[turn])
                    communication = done = longer(communication, start) + taken
                elif taken:
                    compute = done = compute + taken
                arrived.append(done)
                if note is not None and taken:
                    note(names[0], places[issued], done - taken, done)
            start = longer(compute, arrived[turn]) if most else compute
            compute = start + seconds
            if note is not None:
                note(names[1], places[turn], start, compute)
            taken = reduces[turn] if reduces else 0.0
            if not taken:
                continue
            if hides:
                communication = done = longer(communication, compute) + taken
            else:
                compute = done = compute + taken
            if note is not None:
                note("reduce", places[turn], done - taken, done)
        return compute, communication


def _numbers(
    hides: bool,
    ahead: int,
    done: tuple[float, float],
    gathers: Sequence[float],
    computes: Sequence[float],
    reduces: Sequence[float],
) -> tuple[float, float]:
    """A pass as `Streams` plays it, to the last digit, of numbers alone and without a note: most
    that a search prices is one. ``done``: when either stream is, before."""
    compute, communication = done
    most = len(gathers)
    arrived: list[float] = []
    for turn, seconds in enumerate(computes):
        for issued in range(len(arrived), min(turn + ahead + 1, most)):
            taken = gathers[issued]
            if not taken:
                arrived.append(0.0)
            elif hides:
                start = communication if communication > compute else compute
                if issued != turn and arrived[turn] > start:
                    start = arrived[turn]
                communication = start + taken
                arrived.append(communication)
            else:
                compute += taken
                arrived.append(compute)
        if most and arrived[turn] > compute:
            compute = arrived[turn]
        compute += seconds
        taken = reduces[turn] if reduces else 0.0
        if taken and hides:
            communication = (communication if communication > compute else compute) + taken
        elif taken:
            compute += taken
    return compute, communication
