"""What shifts leave bare, beside rings that are played step by step."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from autopar.pricing.rings import bare

RINGS = st.lists(st.tuples(st.integers(2, 5), st.integers(0, 900)), min_size=1, max_size=3)
"""Pieces along each axis, outermost first, and how long a shift along it takes."""


def played(block: int, rings: Sequence[tuple[int, int]]) -> int:
    """When a rank is done that begins each shift before what hides it and waits for it behind."""
    if not rings:
        return block
    (pieces, shift), inner = rings[0], rings[1:]
    now = 0
    for piece in range(pieces):
        comes = now + shift if piece + 1 < pieces else 0
        now = max(now + played(block, inner), comes)
    return now


@given(st.integers(0, 700), RINGS)
def test_as_played(block: int, rings: list[tuple[int, int]]) -> None:
    around, made = 1, []
    for pieces, shift in rings:
        shifts = (pieces - 1) * around
        around *= pieces
        made.append((shifts, shifts * shift))
    assert bare(block * around, made) == played(block, rings) - block * around
