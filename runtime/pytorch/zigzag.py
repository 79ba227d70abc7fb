"""Sequences in zigzag order: rank i of n has chunks i and 2n - 1 - i of 2n (Llama 3,
arXiv:2407.21783, section 3.3.2), so that all have the same work under a causal mask.

All of it is indexing: gradients go back the same way. Nothing moves between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.pytorch import ranks
from autopar.runtime.pytorch.layers import attention, attention_from
from autopar.runtime.shared.settings import ProgramError


def to_zigzag(x: Tensor, dim: int, n: int) -> Tensor:
    """Of ``x`` in natural order the pieces of n ranks, one behind the other along ``dim``."""
    chunks = _chunks(x, dim, n)
    return torch.cat([chunks[c] for i in range(n) for c in (i, 2 * n - 1 - i)], dim)


def from_zigzag(x: Tensor, dim: int, n: int) -> Tensor:
    """The way back: natural order of n ranks' pieces one behind the other along ``dim``."""
    chunks = _chunks(x, dim, n)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)


def own_zigzag(x: Tensor, dim: int, index: int, n: int) -> Tensor:
    """The piece of rank ``index`` of n, of ``x`` in natural order: its two chunks of ``dim``."""
    if not 0 <= index < n:
        raise ProgramError(f"zigzag order has ranks 0 to {n - 1}, and {index} is none of them")
    chunks = _chunks(x, dim, n)
    return torch.cat((chunks[index], chunks[2 * n - 1 - index]), dim)


from_gathered = from_zigzag  # what `gather` along ``dim`` joined is just that


def zigzag_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    axis: str | Sequence[str] = (),
    rows: str | Sequence[str] = (),
) -> Tensor:
    """`attention` of a zigzag piece of the queries along ``rows`` against whole keys and values.

    q [b, h, s/n, d], k and v [b, g, t, d] in natural order -> [b, h, s/n, d]; ``mask`` [.., s/n or
    1, t or 1] has this rank's rows, and columns in natural order. Under a causal mask each chunk is
    computed against the keys up to its end: together (2 n + 1) / 2 n of the keys on every rank.
    """
    axes = (rows,) if isinstance(rows, str) else rows
    n, here, length = ranks.current().size(*axes), ranks.current().index(*axes), q.shape[2]
    if length % 2:
        raise ProgramError(
            f"zigzag rows of {list(q.shape)}: two chunks of one length, and {length} is odd; "
            f"take a sequence that {2 * n} divides"
        )
    if not causal:
        return attention(q, k, v, mask, False, scale, dropout, axis)
    half = length // 2
    chunks = enumerate((half * here, half * (2 * n - 1 - here)))
    return torch.cat(
        [
            attention_from(
                first,
                q.narrow(2, half * i, half),
                k,
                v,
                mask if mask is None or mask.shape[-2] == 1 else mask.narrow(-2, half * i, half),
                True,
                scale,
                dropout,
                axis,
            )
            for i, first in chunks
        ],
        2,
    )


def _chunks(x: Tensor, dim: int, n: int) -> Sequence[Tensor]:
    if x.shape[dim] % (2 * n):
        raise ProgramError(
            f"dim {dim} of {list(x.shape)} in zigzag order on {n} ranks: {2 * n} chunks of one "
            f"length do not make {x.shape[dim]}; take a length that {2 * n} divides"
        )
    return x.chunk(2 * n, dim)
