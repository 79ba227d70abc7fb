"""Attention of one rank's rows of the queries is those rows of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from autopar.nouns import windows
from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import document_blocks, ring_kernels
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch.layers import attention
from autopar.runtime.pytorch.ring_blocks import Block
from tests.runtime.test_pieces import Alone

RANKS, ROWS, HEADS = 4, 16, 4


def whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Written out, without any kernel."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        seen = seen if window is None else seen.triu(1 - window)
        scores = scores.masked_fill(~seen, -torch.inf)
    probabilities: Tensor = scores.softmax(-1)
    return torch.matmul(probabilities, v)


def masks() -> dict[str, Tensor | None]:
    """What hides or adds: of every pair, of keys alone, of rows alone, of each sample and head."""
    draw = torch.Generator().manual_seed(3)

    def hidden(*shape: int) -> Tensor:
        kept = torch.rand(shape, generator=draw) > 0.4
        kept[..., 0] = True  # every row sees something
        return kept

    return {
        "none": None,
        "pairs": hidden(ROWS, ROWS),
        "keys": hidden(2, 1, 1, ROWS),
        "heads": hidden(2, HEADS, ROWS, ROWS),
        "added": torch.randn(2, 1, ROWS, ROWS, generator=draw, dtype=torch.float64),
        "rows": torch.randn(ROWS, 1, generator=draw, dtype=torch.float64),
    }


def own_rows(rank: int, order: str) -> list[int]:
    """Of a rank, from the text of `autopar.runtime.pytorch.zigzag`."""
    pieces = [list(r) for r in torch.arange(ROWS).chunk(2 * RANKS)]
    pair = (rank, 2 * RANKS - 1 - rank) if order == "zigzag" else (2 * rank, 2 * rank + 1)
    return [int(row) for place in pair for row in pieces[place]]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", list(masks()))
def test_rows_are_those_of_the_whole(name: str, causal: bool, order: str) -> None:
    mask = masks()[name]
    draw = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, h, ROWS, 8, generator=draw, dtype=torch.float64) for h in (HEADS, 2, 2)
    )
    expected = whole(q, k, v, mask, causal)
    torch.testing.assert_close(attention(q, k, v, mask, causal), expected, rtol=1e-12, atol=1e-12)
    for rank in range(RANKS):
        alone = Alone(Mesh.parse(f"cp={RANKS}"), rank)
        own = own_rows(rank, order)
        mine = mask if mask is None or mask.shape[-2] == 1 else mask[..., own, :]
        with rank_state.using(alone):
            got = attention(q[:, :, own], k, v, mine, causal, rows="cp", order=order)
        torch.testing.assert_close(got, expected[:, :, own], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 15, 16])
@pytest.mark.parametrize("name", ["none", "heads", "added", "rows", "samples"])
def test_windows(monkeypatch: pytest.MonkeyPatch, name: str, window: int, order: str) -> None:
    """Strips narrower than pieces and wider ones, with their gradients."""
    monkeypatch.setattr(windows, "STRIP_ROWS", 1)
    draw = torch.Generator().manual_seed(5)
    mask = masks()[name] if name in masks() else torch.randn(2, 1, 1, 1, dtype=torch.float64)
    if mask is not None and mask.dtype is torch.bool:
        mask = mask | torch.eye(ROWS, dtype=torch.bool)  # every row sees something
    q, k, v, grad = (
        torch.randn(2, h, ROWS, 8, generator=draw, dtype=torch.float64, requires_grad=True)
        for h in (HEADS, 2, 2, HEADS)
    )
    expected = whole(q, k, v, mask, True, window)
    wanted = torch.autograd.grad(expected, (q, k, v), grad, retain_graph=True)
    got = attention(q, k, v, mask, True, window=window)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    sums = [torch.autograd.grad(got, (q, k, v), grad)]
    torch.testing.assert_close(sums[0], wanted, rtol=1e-12, atol=1e-12)
    for rank in range(RANKS):
        own = own_rows(rank, order)
        mine = mask if mask is None or mask.shape[-2] == 1 else mask[..., own, :]
        with rank_state.using(Alone(Mesh.parse(f"cp={RANKS}"), rank)):
            part = attention(q[:, :, own], k, v, mine, True, rows="cp", order=order, window=window)
        torch.testing.assert_close(part, expected[:, :, own], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rows", "columns", "window"), [(512, 512, 100), (300, 200, 9)])
def test_pairs_of_strips_are_those_that_kernels_are_given(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, window: int
) -> None:
    given = 0

    def counted(q: Tensor, k: Tensor, *rest: object, **named: object) -> Tensor:
        nonlocal given
        given += q.shape[2] * k.shape[2]
        return q

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", counted)
    q, k = torch.zeros(1, 1, rows, 4), torch.zeros(1, 1, columns, 4)
    attention(q, k, k, causal=True, window=window)
    strip = windows.strip_rows(window, columns)
    assert given == windows.seen_pairs(rows, columns, window, strip)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_documents(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: int | None, order: str
) -> None:
    """Of each rank's rows against gathered keys, with their gradients."""
    monkeypatch.setattr(document_blocks, "TILE", 3)
    draw = torch.Generator().manual_seed(5)
    numbers = torch.tensor([[0] * 7 + [1] * 2 + [2] * 7, [4] * 1 + [5] * 14 + [4] * 1])
    same = (numbers[:, :, None] == numbers[:, None])[:, None]
    q, k, v, grad = (
        torch.randn(2, h, ROWS, 8, generator=draw, dtype=torch.float64, requires_grad=True)
        for h in (HEADS, 2, 2, HEADS)
    )
    expected = whole(q, k, v, same, causal, window)
    wanted = torch.autograd.grad(expected, (q, k, v), grad, retain_graph=True)
    got = attention(q, k, v, causal=causal, window=window, documents=(numbers, numbers))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(got, (q, k, v), grad), wanted, rtol=1e-12, atol=1e-12
    )
    for rank in range(RANKS):
        own = own_rows(rank, order)
        with rank_state.using(Alone(Mesh.parse(f"cp={RANKS}"), rank)):
            mine = (numbers[:, own], numbers)
            part = attention(
                q[:, :, own], k, v, causal=causal, rows="cp", order=order, window=window,
                documents=mine,
            )  # fmt: skip
        torch.testing.assert_close(part, expected[:, :, own], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offset", [-1, 0, 3])
def test_rows_of_a_block_that_see_nothing(offset: int) -> None:
    """One document, whose tiles do not stand on the diagonal."""
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(3))
    block = Block((0, 4), (0, 4), offset)
    part = ring_kernels.forward(q, k, v, None, block, 1.0)
    dead = [i for i in range(4) if not any(block.sees(i, j) for j in range(4))]
    assert [i for i in range(4) if part.top[0, 0, i] == -torch.inf] == dead


def test_only_what_documents_show_is_computed() -> None:
    """Squares of tiles along the diagonal, whole ones under no mask."""
    numbers = np.repeat([[0, 1, 2, 3]], [1024, 512, 1536, 1024], axis=1)
    (whole_block,) = (Block((0, 4096), (0, 4096), 0),)
    made = document_blocks.seen_blocks((whole_block,), numbers, numbers)
    assert not any(block.mixed for block in made)
    assert sum(b.height * b.width for b in made) == 512**2 * (3 + 1 + 6 + 3)
    assert {b.aligned for b in made if b.offset is not None} == {True}


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
@pytest.mark.parametrize("name", ["none", "heads", "added", "rows"])
def test_sinks(name: str, causal: bool, window: int | None, order: str) -> None:
    """A column of zeros with a logit for each head."""
    draw = torch.Generator().manual_seed(5)
    mask = masks()[name]
    q, k, v, grad = (
        torch.randn(2, h, ROWS, 8, generator=draw, dtype=torch.float64, requires_grad=True)
        for h in (HEADS, 2, 2, HEADS)
    )
    sinks = torch.randn(HEADS, generator=draw, dtype=torch.float64, requires_grad=True)
    places = torch.arange(ROWS)
    back = places[:, None] - places
    seen = (back >= 0) & (back < (window or ROWS)) if causal else back == back
    added = torch.zeros(2, HEADS, ROWS, ROWS, dtype=torch.float64)
    added = added if mask is None or mask.dtype is torch.bool else added + mask
    seen = seen & mask if mask is not None and mask.dtype is torch.bool else seen
    added = added.masked_fill(~seen, -torch.inf)
    every = torch.cat([added, sinks[None, :, None, None].expand(2, -1, ROWS, 1)], -1)
    keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    expected = whole(q, keys, values, every, False)
    leaves = (q, k, v, sinks)
    wanted = torch.autograd.grad(expected, leaves, grad, retain_graph=True)
    got = attention(q, k, v, mask, causal, window=window, sinks=sinks)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, grad), wanted, rtol=1e-12, atol=1e-12
    )
    for rank in range(RANKS):
        own = own_rows(rank, order)
        mine = mask if mask is None or mask.shape[-2] == 1 else mask[..., own, :]
        with rank_state.using(Alone(Mesh.parse(f"cp={RANKS}"), rank)):
            part = attention(
                q[:, :, own], k, v, mine, causal, rows="cp", order=order, window=window, sinks=sinks
            )
        torch.testing.assert_close(part, expected[:, :, own], rtol=1e-12, atol=1e-12)
