"""What ranks of a ring compute of each piece: every pair that is seen, once, and no others."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.pytorch import ring_blocks
from autopar.runtime.pytorch.ring_blocks import Block, Order, blocks, rounds, shifts, sources

WAYS = [(), (1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 3, 2)]


def places(piece: int, n: int, length: int, order: Order) -> list[int]:
    """Where the rows of a piece stand in the whole."""
    if order == "contiguous":
        return list(range(piece * length, (piece + 1) * length))
    half = length // 2
    chunks = (piece, 2 * n - 1 - piece)
    return [chunk * half + i for chunk in chunks for i in range(half)]


def pairs_of(block: Block) -> list[tuple[int, int]]:
    """Pairs of a row of the piece and a column of the piece that the block sees."""
    return [
        (block.rows[0] + i, block.columns[0] + j)
        for i in range(block.height)
        for j in range(block.width)
        if block.sees(i, j)
    ]


@st.composite
def asked(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, Order, bool, int | None]:
    ways = draw(st.sampled_from(WAYS))
    order = draw(st.sampled_from(ring_blocks.ORDERS))
    causal = draw(st.booleans())
    rows = draw(st.integers(1, 5)) * (2 if order == "zigzag" else 1)
    columns = rows if causal else draw(st.integers(1, 7))
    window = draw(st.none() | st.integers(1, rows * math.prod(ways) + 3)) if causal else None
    return ways, rows, columns, order, causal, window


@given(asked(), st.sampled_from([1, 2, 128]))
def test_every_visible_pair_is_computed_once_and_nothing_else_stands_in_a_block(
    asked: tuple[tuple[int, ...], int, int, Order, bool, int | None], strip: int
) -> None:
    ways, rows, columns, order, causal, window = asked
    n = math.prod(ways)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_blocks, "STRIP_ROWS", strip)
        planned = [blocks(rank, *asked) for rank in range(n)]
    around = rounds(ways, rows, order, causal, window)
    for rank in range(n):
        computed: list[tuple[int, int]] = []
        own = places(rank, n, rows, order)
        held = sources(rank, ways, around)
        assert len(set(held)) == len(held) == len(planned[rank])
        for source, each in zip(held, planned[rank], strict=True):
            theirs = places(source, n, columns, order) if causal else range(n * columns)
            first = 0 if causal else source * columns
            for block in each:
                here = pairs_of(block)
                assert len(here) == block.pairs
                assert {i for i, _ in here} == set(range(*block.rows))
                assert {j for _, j in here} == set(range(*block.columns))
                computed += [(own[i], theirs[first + j]) for i, j in here]
        visible = [
            (i, j)
            for i in own
            for j in range(n * columns)
            if not causal or (j <= i and (window is None or j > i - window))
        ]
        assert sorted(computed) == sorted(visible)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_zigzag_pieces_are_equal_work_and_contiguous_ones_are_not(n: int) -> None:
    rows = 8

    def work(order: Order) -> list[int]:
        return [
            sum(
                block.pairs
                for each in blocks(rank, (n,), rows, rows, order, True)
                for block in each
            )
            for rank in range(n)
        ]

    assert len(set(work("zigzag"))) == 1
    assert sum(work("zigzag")) == sum(work("contiguous")) == n * rows * (n * rows + 1) // 2
    if n > 1:
        assert len(set(work("contiguous"))) == n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_step_of_zigzag_is_one_block_of_half_the_pairs(n: int) -> None:
    for rank in range(n):
        own, *others = blocks(rank, (n,), 8, 8, "zigzag", True)
        assert own == (Block((0, 8), (0, 8), 0),)
        assert all(len(each) == 1 and each[0].pairs == 32 for each in others)
        assert all(each[0].offset is None for each in others)


def test_a_narrow_window_is_computed_in_strips() -> None:
    (own,) = blocks(0, (1,), 1024, 1024, "contiguous", True, 100)
    assert len(own) == 8
    assert max(block.width for block in own) == 128 + 99
    assert sum(block.height * block.width for block in own) < 1024 * 1024 / 4


@pytest.mark.parametrize(
    ("ways", "window", "expected"),
    [
        ((4,), None, (3,)),
        ((4,), 1, (0,)),
        ((4,), 2, (1,)),
        ((4,), 9, (1,)),
        ((4,), 10, (2,)),
        ((4,), 99, (3,)),
        ((4, 2), 2, (1, 2)),
        ((4, 2), 17, (1, 2)),
        ((4, 2), 18, (2, 3)),
        ((4, 2), None, (3, 4)),
        ((2, 3, 2), None, (1, 4, 6)),
    ],
)
def test_a_window_ends_the_way_where_nobody_looks_further(
    ways: tuple[int, ...], window: int | None, expected: tuple[int, ...]
) -> None:
    assert shifts(rounds(ways, 8, "contiguous", True, window)) == expected
    assert shifts(rounds(ways, 8, "zigzag", True, window)) == shifts(ways)


@given(st.sampled_from(WAYS), st.integers(1, 60), st.integers(1, 4))
def test_what_is_not_sent_is_seen_by_nobody(ways: tuple[int, ...], window: int, rows: int) -> None:
    around = rounds(ways, rows, "contiguous", True, window)
    n = math.prod(ways)
    for rank in range(n):
        missing = set(range(n)) - set(sources(rank, ways, around))
        for source in missing:
            assert not ring_blocks.visible(rank, source, n, rows, rows, "contiguous", True, window)
