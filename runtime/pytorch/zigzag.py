"""Pieces in zigzag: of n ranks, rank i has pieces i and 2 n - 1 - i of 2 n equal ones, in this
order. So rows of causal attention are as much work on every rank (Dubey et al. 2024, The Llama 3
herd of models, section 3.3.2).

Axes nest: of an outer axis's two pieces an inner axis takes a pair likewise, and what both of them
make is the zigzag of all their ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_zigzag(x: Tensor, dim: int, ways: int) -> Tensor:
    """``x``, in natural order along ``dim``, as the pieces of all ranks one behind the other."""
    pieces = x.chunk(2 * ways, dim)
    return torch.cat([pieces[i] for rank in range(ways) for i in _own(rank, ways)], dim)


def from_gathered(x: Tensor, dim: int, ways: int) -> Tensor:
    """The inverse of `to_zigzag`."""
    pieces = x.chunk(2 * ways, dim)
    return torch.cat([*pieces[0::2], *pieces[1::2][::-1]], dim)


def own_zigzag(x: Tensor, dim: int, rank: int, ways: int) -> Tensor:
    """The pieces of one rank, of ``x`` in natural order."""
    pieces = x.chunk(2 * ways, dim)
    return torch.cat([pieces[i] for i in _own(rank, ways)], dim)


def among_zeros(x: Tensor, dim: int, rank: int, ways: int) -> Tensor:
    """The pieces of one rank at their places in natural order, zeros at all others."""
    early, late = x.chunk(2, dim)
    zeros = torch.zeros_like(early)
    between = [zeros] * (2 * (ways - 1 - rank))
    return torch.cat([*[zeros] * rank, early, *between, late, *[zeros] * rank], dim)


def _own(rank: int, ways: int) -> tuple[int, int]:
    return rank, 2 * ways - 1 - rank
