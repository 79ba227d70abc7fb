"""Attention of one rank's rows of the queries is those rows of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch.layers import attention
from tests.runtime.test_pieces import Alone

RANKS, ROWS, HEADS = 4, 16, 4


def whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
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
