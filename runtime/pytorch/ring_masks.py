"""What scores meet beside keys, block by block: masks, numbers of documents, sinks."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from autopar.runtime.pytorch.ring_blocks import Block


def expanded(mask: Tensor, q: Tensor, columns: int) -> Tensor:
    """Of four dims and all columns."""
    mask = mask if mask.dtype is torch.bool else mask.to(q.dtype)
    mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
    return mask.expand(*mask.shape[:3], columns)


class Beside(NamedTuple):
    """What scores meet beside keys: a mask, or the documents' numbers of ``own`` rows and of
    ``every`` column as pieces come around; and sinks."""

    mask: Tensor | None
    own: Tensor | None
    every: Tensor | None
    sinks: Tensor | None


def rows_of(x: Tensor, block: Block) -> Tensor:
    return x[:, :, slice(*block.rows)]


def columns_of(x: Tensor, block: Block) -> Tensor:
    return x[:, :, slice(*block.columns)]


def hidden_by(beside: Beside, block: Block, first: int) -> Tensor | None:
    """The mask of a block beside what it says itself."""
    own, every = beside.own, beside.every
    if not block.mixed or own is None or every is None:
        return cast(Tensor | None, of_mask(beside.mask, block, first))
    rows = own[:, None, slice(*block.rows), None]
    return rows == every[:, None, None, first + block.columns[0] : first + block.columns[1]]


def of_mask(mask: Any, block: Block, first: int) -> Any:
    """A view of what a mask says of a block whose piece begins with column ``first`` of all."""
    if mask is None:
        return None
    rows = slice(None) if mask.shape[2] == 1 else slice(*block.rows)
    return mask[:, :, rows, first + block.columns[0] : first + block.columns[1]]
