"""Collectives on the links of a torus (TPU ICI).

A group of an axis covers some dimensions of the torus, whole (a ring, both directions busy) or in
part (a line). A gather or reduction uses all covered dimensions at once; an all-to-all is limited
by the bisection of its longest one: B e/8 per link on a ring of e, B e/4 on a line.
Austin et al. 2025, "How to Scale Your Model", chapter 3.
"""

from __future__ import annotations

from autopar.nouns.level import Level


def covered(level: Level, count: int, spacing: int) -> list[tuple[int, bool, float]]:
    """(extent, is a whole ring, links shared by interleaved groups) of each dimension covered.

    `count` domains of the level below, `spacing` apart in row-major order of `torus_shape`.
    """
    dims = []
    inner = 1
    for size in reversed(level.torus_shape):
        outer = inner * size
        low, high = max(spacing, inner), min(spacing * count, outer)
        extent = high / low
        if extent > 1:
            dims.append((round(extent + 0.499), extent >= size > 2, low / inner))
        inner = outer
    return dims or [(count, False, 1.0)]


def torus_line(
    kind: str, level: Level, count: int, spacing: int, s_per_byte: float
) -> tuple[float, float]:
    """(seconds, seconds per byte) of `kind` over `count` domains; `s_per_byte` of one link."""
    dims = covered(level, count, spacing)
    hops = sum(extent // 2 if ring else extent - 1 for extent, ring, _ in dims)
    alpha_s = hops * level.latency_s
    rate = sum((2 if ring else 1) / shared for _, ring, shared in dims) / s_per_byte
    if kind == "p2p":
        return level.latency_s, s_per_byte * max(shared for _, _, shared in dims)
    if kind == "broadcast":
        return alpha_s, 1 / rate
    if kind == "all_to_all":
        worst = max(extent / (8 if ring else 4) * shared for extent, ring, shared in dims)
        return alpha_s, worst * s_per_byte
    return alpha_s, (count - 1) / count / rate
