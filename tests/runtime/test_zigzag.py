"""Zigzag order there and back, and rows of it against keys in natural order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch.collectives import gather
from autopar.runtime.pytorch.zigzag import (
    from_gathered,
    from_zigzag,
    own_zigzag,
    to_zigzag,
    zigzag_rows,
)
from autopar.runtime.shared.settings import ProgramError
from tests.emit import simulated
from tests.runtime.test_attention_rows import HEADS, masks, whole
from tests.runtime.test_pieces import Alone

ROWS = 12  # those of `masks`


def test_pieces_are_a_chunk_and_its_mirror() -> None:
    x = torch.arange(12)
    assert [own_zigzag(x, 0, i, 3).tolist() for i in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert to_zigzag(x, 0, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]


@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([0, 1, 2, -1]))
def test_there_and_back_is_nothing(n: int, chunk: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = 2 * n * chunk
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    there = to_zigzag(x, dim, n)
    assert torch.equal(from_zigzag(there, dim, n), x)
    assert torch.equal(to_zigzag(from_zigzag(x, dim, n), dim, n), x)
    pieces = [own_zigzag(x, dim, i, n) for i in range(n)]
    assert torch.equal(torch.cat(pieces, dim), there)
    grad = torch.randn(shape, dtype=torch.float64)
    (back,) = torch.autograd.grad(there, x, to_zigzag(grad, dim, n))
    assert torch.equal(back, grad)


@pytest.mark.parametrize("dim", [0, 1])
def test_gathered_pieces_come_into_natural_order(dim: int) -> None:
    x = torch.arange(2 * 16, dtype=torch.float64).view(2, 16).transpose(0, 1 - dim)
    x = x.contiguous()

    def task(here: object) -> Tensor:
        place = rank_state.current().index("cp")
        return from_gathered(gather(own_zigzag(x, dim, place, 4), dim, "cp"), dim, 4)

    by_rank, _ = simulated.run(Mesh.parse("cp=4"), task)
    assert all(torch.equal(got, x) for got in by_rank)


def test_a_length_that_does_not_divide_is_named() -> None:
    with pytest.raises(ProgramError, match="take a length that 8 divides"):
        to_zigzag(torch.zeros(2, 12), 1, 4)
    with pytest.raises(ProgramError, match="ranks 0 to 2, and 3 is none"):
        own_zigzag(torch.zeros(12), 0, 3, 3)
    odd = torch.zeros(1, 1, 3, 2)
    with rank_state.using(Alone(Mesh.parse("cp=4"))), pytest.raises(ProgramError, match="is odd"):
        zigzag_rows(odd, odd, odd, causal=True, rows="cp")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", list(masks()))
@pytest.mark.parametrize("mesh", ["cp=3", "cp=2", "a=3 x b=2"])
def test_rows_are_those_of_the_whole(mesh: str, name: str, causal: bool) -> None:
    mask = masks()[name]
    draw = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, h, ROWS, 8, generator=draw, dtype=torch.float64) for h in (HEADS, 2, 2)
    )
    expected = whole(q, k, v, mask, causal)
    axes, n = Mesh.parse(mesh).axes, Mesh.parse(mesh).device_count
    for rank in range(n):
        mine = mask
        if mask is not None and mask.shape[-2] > 1:
            mine = own_zigzag(mask, -2, rank, n)
        with rank_state.using(Alone(Mesh.parse(mesh), rank)):
            got = zigzag_rows(own_zigzag(q, 2, rank, n), k, v, mine, causal, rows=axes)
        right = own_zigzag(expected, 2, rank, n)
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_gradients_of_all_ranks_are_those_of_the_whole() -> None:
    draw = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(2, h, ROWS, 8, generator=draw, dtype=torch.float64, requires_grad=True)
        for h in (HEADS, 2, 2)
    )
    grad = torch.randn(2, HEADS, ROWS, 8, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(whole(q, k, v, None, True), (q, k, v), grad)
    got = [torch.zeros_like(x) for x in (q, k, v)]
    for rank in range(3):
        with rank_state.using(Alone(Mesh.parse("cp=3"), rank)):
            out = zigzag_rows(own_zigzag(q, 2, rank, 3), k, v, causal=True, rows="cp")
        parts = torch.autograd.grad(out, (q, k, v), own_zigzag(grad, 2, rank, 3))
        got = [x + part for x, part in zip(got, parts, strict=True)]
    for x, right in zip(got, expected, strict=True):
        torch.testing.assert_close(x, right, rtol=1e-12, atol=1e-12)
