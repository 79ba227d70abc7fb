"""Reshape's factors: products of them make both shapes, and none could be coarser."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.rules.views import common_factors, reshape_terms

sizes = st.lists(st.integers(2, 12), max_size=4)


@given(sizes, st.data())
def test_factors_make_both_shapes(old: list[int], data: st.DataObject) -> None:
    rest, new = math.prod(old), []
    while rest > 1:
        new.append(data.draw(st.sampled_from([n for n in range(2, rest + 1) if rest % n == 0])))
        rest //= new[-1]
    ours, theirs = common_factors(old, new)
    for pieces, shape in ((ours, old), (theirs, new)):
        cuts = {math.prod(n for n, _ in pieces[:i]) for i in range(len(pieces) + 1)}
        assert {math.prod(shape[:i]) for i in range(len(shape) + 1)} <= cuts
        assert all(n > 1 for n, _ in pieces)
    assert [n for n, shared in ours if shared] == [n for n, shared in theirs if shared]
    # Cuts that both shapes have anyway are the only ones, and those of one side that fit the other.
    cuts = {math.prod(s[:i]) for s in (old, new) for i in range(len(s) + 1)}
    own = {math.prod(n for n, _ in p[:i]) for p in (ours, theirs) for i in range(len(p) + 1)}
    assert own - cuts <= {math.gcd(a, b) for a in cuts for b in cuts}


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ((8, 16, 64), (8, 16, 4, 16), "a~ b~ (c=4 d=16) -> a~ b~ c d"),
        ((8, 4, 16, 16), (32, 16, 16), "a b c~ d~ -> (a=8 b=4) c~ d~"),
        ((6, 4), (3, 8), "(a=3 b=2) c -> a (b=2 c=4)"),
        ((4, 6), (6, 4), "(a=2 b=2!) c! -> (a=2 d=3!) e!"),
        ((4, 6, 7), (6, 4, 7), "(a=2 c=2!) d! b~ -> (a=2 e=3!) f! b~"),
        ((2, 3), (1, 2, 3, 1), "a~ b~ -> 1 a~ b~ 1"),
        ((), (1, 1), " -> 1 1"),
        ((0, 3), (3, 0), "a0! a1! -> b0! b1!"),
    ],
)
def test_texts(old: tuple[int, ...], new: tuple[int, ...], text: str) -> None:
    left, right = reshape_terms(old, new)
    assert f"{' '.join(left)} -> {' '.join(right)}" == text
