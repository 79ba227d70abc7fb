"""Levels of interconnect: one, and the slowest of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

Topology = Literal["switch", "torus", "bus"]
Library = Literal["nccl", "gloo", "xla"]


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective over `ranks` ranks `stride` apart as measured, at one size after the other."""

    kind: str
    ranks: int
    points: tuple[tuple[float, float], ...]
    """(bytes, seconds); more bytes never take less."""
    stride: int = 1


@dataclass(frozen=True)
class Level:
    """One level of interconnect: domains of `span` consecutive ranks.

    A domain of the level below (a single device at the innermost) is attached by `ports` ports of
    `bandwidth_bytes_per_s` each, one direction; one device drives at most one port. Eight rails
    per node are `ports=8`; one network card for all devices of a node is `ports=1`. Above the first
    tier `oversubscription` divides what the ports can carry at once.
    """

    name: str
    span: int
    bandwidth_bytes_per_s: float
    latency_s: float
    ports: int = 1
    topology: Topology = "switch"
    oversubscription: float = 1.0
    torus_shape: tuple[int, ...] = ()
    """Links of a torus run along these dimensions, the last one fastest in rank order."""
    torus_wraps: tuple[bool, ...] = ()
    """Whether the last domain of each dimension is joined to its first; empty: all longer than 2
    are."""
    in_network_reduction: bool = False
    """The switch can add (NVLS, SHARP): an all-reduce then sends each byte up and down once."""
    library: Library = "nccl"
    """Whose collectives run here; gloo's reduce-scatter is an all-reduce inside."""
    measured: tuple[MeasuredCollective, ...] = ()
    """What `autopar profile` measured of groups whose outermost level this is."""
    contention: float = 0.0
    """What a hidden second of communication costs the compute that hides it, in seconds."""

    def rings(self) -> tuple[bool, ...]:
        """For each dimension of a torus whether it is a ring; two domains have one link alone."""
        wraps = self.torus_wraps or (True,) * len(self.torus_shape)
        return tuple(size > 2 and wrap for size, wrap in zip(self.torus_shape, wraps, strict=True))


def slowest_levels(views: Sequence[tuple[Level, ...]]) -> tuple[Level, ...]:
    """Levels under which nothing is faster than under any of ``views``, of as many devices each."""
    if all(levels == views[0] for levels in views):
        return views[0]
    total = views[0][-1].span
    spans = [1]
    for span in sorted({level.span for levels in views for level in levels}):
        if span % spans[-1] == 0 and total % span == 0:  # else what lies further out joins these
            spans.append(span)
    columns = zip(*(_spanned(levels, spans) for levels in views), strict=True)
    return tuple(map(_slowest_level, columns))


def _spanned(levels: Sequence[Level], spans: Sequence[int]) -> Iterator[Level]:
    """The same links with a level from each of ``spans`` to the next.

    A switch of wide domains is one of narrow ones, and above it one that joins these with the
    ports of all that they hold.
    """
    inside = (1, *(level.span for level in levels))
    for child, span in pairwise(spans):
        crossed = [
            replace(level, span=span, ports=max(1, level.ports * child // own))
            for own, level in zip(inside, levels, strict=False)
            if own < span and level.span > child
        ]
        yield _slowest_level(crossed)


def _slowest_level(levels: Sequence[Level]) -> Level:
    """Of one span. Times that a profile measured stay where all levels have the same."""
    first = levels[0]
    same = all(level.measured == first.measured for level in levels)
    return replace(
        first,
        name=" and ".join(dict.fromkeys(level.name for level in levels)),
        bandwidth_bytes_per_s=min(level.bandwidth_bytes_per_s for level in levels),
        latency_s=max(level.latency_s for level in levels),
        ports=min(level.ports for level in levels),
        oversubscription=max(level.oversubscription for level in levels),
        in_network_reduction=all(level.in_network_reduction for level in levels),
        contention=max(level.contention for level in levels),
        measured=first.measured if same else (),
    )


def level_from_dict(data: dict[str, Any]) -> Level:
    measured = tuple(map(_measured_from_dict, data["measured"]))
    tuples = {name: tuple(data.get(name, ())) for name in ("torus_shape", "torus_wraps")}
    return Level(**{**data, **tuples, "measured": measured})


def _measured_from_dict(data: dict[str, Any]) -> MeasuredCollective:
    points = tuple((float(size), float(seconds)) for size, seconds in data["points"])
    return MeasuredCollective(**{**data, "points": points})
