"""Pieces in zigzag: what each function does is what its words say, also of nested axes."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.pytorch.zigzag import among_zeros, from_gathered, own_zigzag, to_zigzag


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
def test_pieces_of_all_ranks_are_the_whole(ways: int) -> None:
    x = torch.arange(2 * 24 * 3).view(2, 24, 3)
    own = [own_zigzag(x, 1, rank, ways) for rank in range(ways)]
    size = 24 // (2 * ways)
    for rank, piece in enumerate(own):
        late = 2 * ways - 1 - rank
        assert torch.equal(piece[:, :size], x[:, rank * size : (rank + 1) * size])
        assert torch.equal(piece[:, size:], x[:, late * size : (late + 1) * size])
    assert torch.equal(torch.cat(own, 1), to_zigzag(x, 1, ways))
    assert torch.equal(from_gathered(torch.cat(own, 1), 1, ways), x)
    placed = [among_zeros(piece, 1, rank, ways) for rank, piece in enumerate(own)]
    assert torch.equal(torch.stack(placed).sum(0), x)


@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_an_inner_axis_takes_pairs_of_a_pair(outer: int, inner: int) -> None:
    x = torch.arange(4 * outer * inner * 3).view(1, -1)
    for rank in range(outer):
        nested = own_zigzag(x, 1, rank, outer)
        for place in range(inner):
            whole = own_zigzag(x, 1, rank * inner + place, outer * inner)
            assert torch.equal(own_zigzag(nested, 1, place, inner), whole)
        pieces = [own_zigzag(nested, 1, place, inner) for place in range(inner)]
        assert torch.equal(from_gathered(torch.cat(pieces, 1), 1, inner), nested)
