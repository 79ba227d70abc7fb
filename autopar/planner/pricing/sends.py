"""What stages of a pipeline send one another, and the clocks of a schedule that sends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.lowering.spread import Lowered
from autopar.lowering.stages import remade
from autopar.pipeline.actions import Schedule
from autopar.pipeline.clock import Clock, Pair
from autopar.planner.pricing.runs import Table

Ends = tuple[int, ...]
"""The unit behind the last one of every stage."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A value that stages may have to send: bytes of a microbatch, the unit that makes it, those
    that read it behind that."""

    size_bytes: int
    maker: int
    readers: tuple[int, ...]


def flows(lowered: Lowered, units: Sequence[str]) -> tuple[Flow, ...]:
    """What one unit makes and another reads, without what every stage makes for itself.

    units: their first ops.
    """
    starts = {name: i for i, name in enumerate(units)}
    again = remade(lowered)
    maker: dict[str, int] = {}
    readers: dict[str, dict[int, None]] = {}
    unit = 0
    for op in lowered.ops:
        unit = starts.get(op.op.name, unit)
        for operand in op.operands:
            if maker.get(operand.name, unit) < unit and operand.name not in again:
                readers.setdefault(operand.name, {})[unit] = None
        maker |= dict.fromkeys(op.op.outputs, unit)
    return tuple(
        Flow(lowered.local_bytes(name), maker[name], tuple(read_by))
        for name, read_by in readers.items()
    )


class Sends:
    """``units``: how many there are; ``value_s``: seconds of a value by its bytes."""

    def __init__(self, sent: Sequence[Flow], units: int, value_s: Callable[[int], float]) -> None:
        makers, before, readers, seconds = [], [], [], []
        self.crossing_s = np.zeros(units + 1)
        """[units + 1] of all values that pass each cut."""
        for flow in sent:
            took = value_s(flow.size_bytes)
            self.crossing_s[flow.maker + 1 : flow.readers[-1] + 1] += took
            for last, reader in zip((flow.maker, *flow.readers), flow.readers, strict=False):
                makers.append(flow.maker)
                before.append(last)
                readers.append(reader)
                seconds.append(took)
        self._places = np.array([makers, before, readers], dtype=np.intp)
        self._seconds = np.array(seconds)

    def between(self, cuts: Sequence[Ends]) -> tuple[tuple[Pair, ...], Table]:
        """What parts of the model send one another, for cuts into equally many.

        The pairs of parts that send past the next part under any of the cuts, and seconds of a
        microbatch [pairs, cuts]; the pairs of its rows are `pairs_of`.
        """
        ends = np.array(cuts)
        columns, parts = ends.shape
        starts = np.zeros((columns, len(self.crossing_s)), dtype=np.intp)
        starts[np.arange(columns)[:, None], ends] = 1
        part = starts.cumsum(axis=1)  # of each unit
        maker, before, reader = np.moveaxis(part[:, self._places], 1, 0)  # [columns, values]
        sent = reader != before  # once to each part, however many of its units read it
        seconds = np.broadcast_to(self._seconds, sent.shape)[sent]
        column = np.broadcast_to(np.arange(columns)[:, None], sent.shape)[sent]
        maker, reader = maker[sent], reader[sent]
        near = reader == maker + 1
        nearest = np.bincount(
            maker[near] * columns + column[near], seconds[near], minlength=(parts - 1) * columns
        ).reshape(parts - 1, columns)
        far: dict[Pair, Table] = {}
        for i in (~near).nonzero()[0].tolist():
            pair = int(maker[i]), int(reader[i])
            far.setdefault(pair, np.zeros(columns))[column[i]] += seconds[i]
        skips = tuple(sorted(far))
        return skips, np.vstack([nearest, *(far[pair] for pair in skips)])


def pairs_of(parts: int, skips: Sequence[Pair]) -> list[Pair]:
    """Each part and the next; then ``skips``."""
    return [*((part, part + 1) for part in range(parts - 1)), *skips]


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule with the clocks that play it, by what is sent past the next part.

    written: its actions do not follow from its name.
    """

    schedule: Schedule
    written: bool = False
    _clocks: dict[tuple[Pair, ...], Clock] = field(default_factory=dict)

    def clock(self, skips: tuple[Pair, ...]) -> Clock:
        """``skips``: see `Sends.between`."""
        if skips not in self._clocks:
            routes = self.schedule.routes
            past = [(route[a], route[b]) for route in routes for a, b in skips]
            self._clocks[skips] = Clock(self.schedule, past)
        return self._clocks[skips]
