"""Collectives on the links of a torus (TPU ICI).

A group of an axis covers some dimensions of the torus, whole (a ring where the ends are joined,
both directions busy) or in part (a line). A gather or reduction uses all covered dimensions at
once; an all-to-all is limited by the bisection of its longest one: B e/8 per link on a ring of e,
B e/4 on a line. Austin et al. 2025, "How to Scale Your Model", chapter 3.

The compiler makes a whole all-reduce of some reduce-scatters (`sums_whole`): twice the bytes.
Programs make two of such a one, where that is possible (`divided`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.nouns.level import Level

_SQUARE_FROM = 4


@dataclass(frozen=True)
class Covered:
    """What a group has of one dimension of a torus.

    extent: domains, from the group's first to its last along it.
    ring:   all of a dimension whose ends are joined.
    shared: links are shared by so many groups that lie between each other.
    """

    extent: int
    ring: bool
    shared: float
    dim: int = 0
    """Of `Level.torus_shape`."""


def covered(level: Level, count: int, spacing: int) -> list[Covered]:
    """Each dimension that a group covers, the fastest first.

    `count` domains of the level below, `spacing` apart in row-major order of `torus_shape`.
    """
    dims = []
    inner = 1
    rings = level.rings()
    for dim in reversed(range(len(level.torus_shape))):
        size = level.torus_shape[dim]
        outer = inner * size
        low, high = max(spacing, inner), min(spacing * count, outer)
        extent = high / low
        if extent > 1:
            whole = extent >= size and rings[dim]
            dims.append(Covered(round(extent + 0.499), whole, low / inner, dim))
        inner = outer
    return dims or [Covered(count, False, 1.0)]


def sums_whole(level: Level, count: int, spacing: int, across: bool) -> bool:
    """Whether a reduce-scatter over such a group is compiled as an all-reduce and a slice.

    across: the group has ranks in other slices too.

    Read off what libtpu 0.0.52 compiles for v4, v5e, v5p and v6e, in float32 and bfloat16 and for
    all sizes tried (`python -m benchmarks.tpu_scatters`): so it is where a group is the whole
    slice, and that has three dimensions or is a square of two from 4 x 4 on, whether or not its
    ends are joined, and for the part inside each slice of a group over several. Gathers never are.
    """
    if across:
        return True
    sizes = [size for size in level.torus_shape if size > 1]
    square = len(sizes) == 2 and sizes[0] == sizes[1] >= _SQUARE_FROM
    return spacing == 1 and count == math.prod(level.torus_shape) and (len(sizes) > 2 or square)


def divided(count: int, outer: int = 0) -> tuple[int, int]:
    """Into which two a reduce-scatter over a whole slice is divided: ranks evenly apart first, then
    the neighbours that each of them has. outer: of a group over several axes, the ranks of the
    outermost, which come first; 0: it is one axis, whose neighbours come by twos."""
    first = outer or count // 2
    return first, count // first


def torus_line(
    kind: str,
    level: Level,
    count: int,
    spacing: int,
    s_per_byte: float,
    across: bool = False,
    outer: int = 0,
) -> tuple[float, float]:
    """(seconds, seconds per byte) of `kind` over `count` domains; `s_per_byte` of one link.
    across: see `sums_whole`; outer: see `divided`."""
    whole = kind == "reduce_scatter" and sums_whole(level, count, spacing, across)
    if whole and not across:
        first, then = divided(count, outer)
        far_s, far = torus_line(kind, level, first, spacing * then, s_per_byte)
        near_s, near = torus_line(kind, level, then, spacing, s_per_byte)
        return far_s + near_s, far + near / first
    dims = covered(level, count, spacing)
    hops = sum(d.extent // 2 if d.ring else d.extent - 1 for d in dims)
    alpha_s = hops * level.latency_s
    rate = sum((2 if d.ring else 1) / d.shared for d in dims) / s_per_byte
    if kind == "p2p":
        return level.latency_s, s_per_byte * max(d.shared for d in dims)
    if kind == "broadcast":
        return alpha_s, 1 / rate
    if kind == "all_to_all":
        worst = max(d.extent / (8 if d.ring else 4) * d.shared for d in dims)
        return alpha_s, worst * s_per_byte
    times = 2 if whole else 1
    return times * alpha_s, times * (count - 1) / count / rate
