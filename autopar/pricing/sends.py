"""What stages of a pipeline send one another, and the clocks of a schedule that sends it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from autopar.lowering.lowered import Lowered
from autopar.lowering.stages import remade
from autopar.pipeline.actions import Schedule
from autopar.pipeline.clock import Clock, Pair, Times
from autopar.pricing.links import Links, Places
from autopar.pricing.runs import Table

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


@dataclass(frozen=True, slots=True)
class Sent:
    """What parts of the model send one another under some cuts into equally many.

    skips:   the pairs of parts that send past the next part under any of the cuts.
    seconds: [links, pairs of parts, cuts] of a microbatch; pairs are `pairs_of`.
    links:   [ranks, ranks] place in ``seconds``, of the ranks that parts live on.
    """

    skips: tuple[Pair, ...]
    seconds: Table
    links: Places

    def between(self, schedule: Schedule, pairs: Sequence[Pair]) -> Table:
        """[pairs, cuts] of these pairs of a schedule's stages."""
        one, other, place = _places(schedule.routes, schedule.ranks, tuple(pairs), self.skips)
        return self.seconds[self.links[one, other], place]


@lru_cache(maxsize=4096)
def _places(
    routes: tuple[tuple[int, ...], ...],
    ranks: tuple[int, ...],
    pairs: tuple[Pair, ...],
    skips: tuple[Pair, ...],
) -> tuple[Places, Places, Places]:
    """Of pairs of stages the ranks of either, and the place of their parts among `pairs_of`."""
    part = {stage: i for route in routes for i, stage in enumerate(route)}
    place = {pair: i for i, pair in enumerate(pairs_of(len(routes[0]), skips))}
    one, other = (np.array([ranks[pair[end]] for pair in pairs], np.intp) for end in (0, 1))
    return one, other, np.array([place[part[a], part[b]] for a, b in pairs], np.intp)


class Sends:
    """``units``: how many there are; ``links``: what pipeline ranks send over."""

    def __init__(self, sent: Sequence[Flow], units: int, links: Links) -> None:
        self.links = links.between
        makers, before, readers = [], [], []
        took: list[list[float]] = []
        crossing: list[tuple[int, int, list[float]]] = []
        for flow in sent:
            each = [link.time_s(flow.size_bytes) for link in links.kinds]
            crossing.append((flow.maker + 1, flow.readers[-1] + 1, each))
            for last, reader in zip((flow.maker, *flow.readers), flow.readers, strict=False):
                makers.append(flow.maker)
                before.append(last)
                readers.append(reader)
                took.append(each)
        self._places = np.array([makers, before, readers], dtype=np.intp)
        self._seconds = np.array(took).reshape(len(took), len(links.kinds)).T
        self.crossing_s = np.zeros((len(links.kinds), units + 1))
        """[links, units + 1] of all values that pass each cut."""
        for first, end, each in crossing:
            self.crossing_s[:, first:end] += np.array(each)[:, None]

    def between(self, cuts: Sequence[Ends]) -> Sent:
        ends = np.array(cuts)
        columns, parts = ends.shape
        starts = np.zeros((columns, self.crossing_s.shape[1]), dtype=np.intp)
        starts[np.arange(columns)[:, None], ends] = 1
        part = starts.cumsum(axis=1)  # of each unit
        maker, before, reader = np.moveaxis(part[:, self._places], 1, 0)  # [columns, values]
        sent = reader != before  # once to each part, however many of its units read it
        column, value = sent.nonzero()
        maker, reader = maker[sent], reader[sent]
        near = reader == maker + 1
        far = (~near).nonzero()[0].tolist()
        skips = tuple(sorted({(int(maker[i]), int(reader[i])) for i in far}))
        row = {pair: parts - 1 + i for i, pair in enumerate(skips)}
        rows = maker.copy()  # of its pair of parts
        rows[far] = [row[int(maker[i]), int(reader[i])] for i in far]
        shape = len(self._seconds), parts - 1 + len(skips), columns
        seconds = [
            np.bincount(rows * columns + column, took[value], minlength=math.prod(shape[1:]))
            for took in self._seconds
        ]
        return Sent(skips, np.reshape(seconds, shape), self.links)


def pairs_of(parts: int, skips: Sequence[Pair]) -> list[Pair]:
    """Each part and the next; then ``skips``."""
    return [*((part, part + 1) for part in range(parts - 1)), *skips]


class Timed(Protocol):
    """What plays the actions of a schedule, as `autopar.pipeline.clock.Clock`."""

    @property
    def pairs(self) -> tuple[Pair, ...]: ...

    def times(self, actions_s: Table, sends_s: Table, reduce_s: Table) -> Times: ...


class Played(Protocol):
    """A schedule with what plays it; it may stand for a longer one of ``microbatches``."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def microbatches(self) -> int: ...

    def clock(self, skips: tuple[Pair, ...]) -> Timed: ...


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule with the clocks that play it, by what is sent past the next part.

    written: its actions do not follow from its name.
    """

    schedule: Schedule
    written: bool = False
    _clocks: dict[tuple[Pair, ...], Clock] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        return self.schedule.microbatches

    def clock(self, skips: tuple[Pair, ...]) -> Clock:
        """``skips``: see `Sends.between`."""
        if skips not in self._clocks:
            routes = self.schedule.routes
            past = [(route[a], route[b]) for route in routes for a, b in skips]
            self._clocks[skips] = Clock(self.schedule, past)
        return self._clocks[skips]
