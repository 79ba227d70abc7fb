"""Pieces in zigzag: of n ranks, rank i has pieces i and 2 n - 1 - i of 2 n equal ones, in this
order. So rows of causal attention are as much work on every rank (Dubey et al. 2024, The Llama 3
herd of models, section 3.3.2).

Axes nest: of an outer axis's two pieces an inner axis takes a pair likewise, and what both of them
make is the zigzag of all their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.shared.settings import ProgramError


def to_zigzag(x: Tensor, dim: int, ways: int) -> Tensor:
    """``x``, in natural order along ``dim``, as the pieces of all ranks one behind the other."""
    pieces = _pieces(x, dim, ways)
    return torch.cat([pieces[i] for rank in range(ways) for i in _own(rank, ways)], dim)


def from_gathered(x: Tensor, dim: int, ways: int) -> Tensor:
    """The inverse of `to_zigzag`."""
    pieces = _pieces(x, dim, ways)
    return torch.cat([*pieces[0::2], *pieces[1::2][::-1]], dim)


def own_zigzag(x: Tensor, dim: int, rank: int, ways: int) -> Tensor:
    """The pieces of one rank, of ``x`` in natural order."""
    pieces = _pieces(x, dim, ways)
    return torch.cat([pieces[i] for i in _own(rank, ways)], dim)


def among_zeros(x: Tensor, dim: int, rank: int, ways: int) -> Tensor:
    """The pieces of one rank at their places in natural order, zeros at all others."""
    early, late = x.chunk(2, dim)
    zeros = torch.zeros_like(early)
    between = [zeros] * (2 * (ways - 1 - rank))
    return torch.cat([*[zeros] * rank, early, *between, late, *[zeros] * rank], dim)


def _pieces(x: Tensor, dim: int, ways: int) -> Sequence[Tensor]:
    if x.shape[dim] % (2 * ways):
        raise ProgramError(
            f"dim {dim} of {list(x.shape)} in zigzag on {ways} ranks: {2 * ways} pieces of one "
            f"length do not make {x.shape[dim]}; take a length that {2 * ways} divides"
        )
    return x.chunk(2 * ways, dim)


def _own(rank: int, ways: int) -> tuple[int, int]:
    return rank, 2 * ways - 1 - rank
