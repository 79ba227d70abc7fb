"""What passes around rings of attention while its blocks compute.

A rank of n computes a block of each piece of keys and values; the next piece comes meanwhile, so
that n - 1 blocks hide n - 1 shifts. Where rings make up one of two levels, a rank has the pieces of
its inner ring one after the other, n_i of them, for each of the n_o that come around the outer
one: that shift has a whole round of the inner ring to pass in (BurstAttention, arXiv:2403.09347;
LoongTrain, arXiv:2406.18485).
"""

from __future__ import annotations

from collections.abc import Sequence


def bare(computed: int, rings: Sequence[tuple[int, int]]) -> int:
    """Picoseconds of all shifts that blocks, which compute so long together, leave bare; ``rings``:
    outermost first, how many shifts are made along each, and how long they take together."""
    pieces, around = [], 1
    for shifts, _ in rings:
        pieces.append(shifts // around + 1)
        around *= pieces[-1]
    elapsed = computed
    for n, (_, moved) in zip(pieces[::-1], rings[::-1], strict=True):
        elapsed += max(moved - elapsed * (n - 1) // n, 0)
    return elapsed - computed
