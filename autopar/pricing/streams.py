"""Units of a model on a compute stream and a communication stream, one microbatch of them.

Model-axis collectives stand in line with compute. Data-axis traffic runs on the communication
stream: a unit's parameters are gathered while units before it compute, its gradients are reduced
as soon as its backward is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost_models.columns import Number, larger_of
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


def play(
    units: Sequence[UnitTime],
    last: Sequence[float] | None,
    gather: bool,
    hides: bool,
    ahead: int = USUAL,
    note: Note | None = None,
) -> tuple[float, float]:
    """Seconds of one microbatch's forward, and of all of it.

    last: of the last one, what each unit reduces in it alone.

    Unit 0 is the root, gathered first and reduced last. The gather of a unit is issued when the
    unit ``ahead`` before it starts to compute, so backward it goes before that unit's reduction.
    ``hides``: communication runs beside compute, else each waits for the other.
    """
    compute = communication = 0.0
    longer = larger_of(*(unit.forward_s for unit in units))

    def moved(issued: float, seconds: float, work: Work, place: int) -> float:
        """When a collective is done; it starts no sooner than ``issued``."""
        nonlocal compute, communication
        if not seconds:
            return 0.0
        if not hides:
            compute = done = compute + seconds
        else:
            communication = done = longer(communication, issued) + seconds
        if note is not None:
            note(work, place, done - seconds, done)
        return done

    def ran(work: Work, place: int, start: float, seconds: Number) -> None:
        nonlocal compute
        compute = start + seconds
        if note is not None:
            note(work, place, start, compute)

    def gathered(work: Work, order: Sequence[int], turn: int) -> float:
        """When the unit whose ``turn`` it is may start; issues the gathers of those behind it."""
        if not gather:
            return compute
        if len(arrived) == turn:
            arrived.append(moved(compute, seconds[turn], work, order[turn]))
        start = longer(compute, arrived[turn])
        for place in range(len(arrived), min(turn + ahead + 1, len(seconds))):
            arrived.append(moved(start, seconds[place], work, order[place]))
        return longer(start, compute)

    arrived: list[float] = []
    there = range(len(units))
    seconds = [unit.gather_s for unit in units]
    for place in there:
        ran("forward", place, gathered("gather", there, place), units[place].forward_s)
    forward = compute
    back = there[::-1]
    arrived, seconds = [], [units[place].regather_s for place in back]
    for turn, place in enumerate(back):
        ran("backward", place, gathered("regather", back, turn), units[place].backward_s)
        own_s = 0.0 if last is None else last[place]
        moved(compute, units[place].reduce_s + own_s, "reduce", place)
    return forward, longer(compute, communication)
