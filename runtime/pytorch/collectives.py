"""Resharding an activation along one mesh axis: the functions that emitted programs call.

Each function states one step of `autopar.rules.resharding`, forward and backward:

=================================================  ==================  ==================
call                                               forward             backward
=================================================  ==================  ==================
``all_reduce(x, axis)``                            all_reduce          nothing
``copy_to(x, axis)``                               nothing             all_reduce
``reduce_scatter(x, dim, axis)``                   reduce_scatter      all_gather
``gather(x, dim, axis, backward="slice")``         all_gather          keep the own piece
``gather(x, dim, axis, backward="reduce_scatter")``  all_gather        reduce_scatter
``shard(x, dim, axis, backward="all_gather")``     keep the own piece  all_gather
``shard(x, dim, axis, backward="pad")``            keep the own piece  pad with zeros
``all_to_all(x, split, concat, axis)``             all_to_all          all_to_all
``exchange_rows(x, sent, received, axis, ...)``    all_to_all          all_to_all
``pad(x, dim, size, axis)``                        zeros around        keep the own piece
``keep_first(x, axis)``                            zeros past rank 0   nothing
``keep_first(x, axis, backward="keep_first")``     zeros past rank 0   zeros past rank 0
``whole(x, axis)``                                 nothing             zeros past rank 0
=================================================  ==================  ==================

``exchange_rows``, ``pad`` and ``shard(..., backward="pad")`` take uneven pieces too; the others
need a dim that the axis divides. Every collective is waited for where it is issued. With
``order="zigzag"`` pieces lie as `autopar.runtime.pytorch.zigzag` has them; ``all_to_all`` takes the
dim of which that is so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.zigzag import among_zeros, from_gathered, own_zigzag, to_zigzag


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """The sum of ``x`` over ``axis``; its gradient is whole on every rank already."""
    if x.dtype is torch.bool:  # one rank has the value, the others False
        return all_reduce(x.to(torch.uint8), axis).bool()
    return _apply(_AllReduce, x, axis)


def copy_to(x: Tensor, axis: str) -> Tensor:
    """``x`` itself; each rank's gradient is a part of it, and backward sums the parts."""
    return _apply(_CopyTo, x, axis)


def reduce_scatter(x: Tensor, dim: int, axis: str, order: str = "contiguous") -> Tensor:
    """The sum of ``x`` over ``axis``, of which each rank keeps its piece of ``dim``."""
    if x.dtype is torch.bool:
        return reduce_scatter(x.to(torch.uint8), dim, axis, order).bool()
    x = to_zigzag(x, dim, transport.size(axis)) if order == "zigzag" else x
    return _apply(_ReduceScatter, x, dim, axis)


def gather(
    x: Tensor, dim: int, axis: str, backward: str = "none", order: str = "contiguous"
) -> Tensor:
    """The pieces of ``dim`` put together. ``backward`` is ``slice`` where the gradient is whole on
    every rank, ``reduce_scatter`` where each rank has a part of it, ``none`` without gradient."""
    x = _apply(_GatherPart if backward == "reduce_scatter" else _Gather, x, dim, axis)
    return from_gathered(x, dim, transport.size(axis)) if order == "zigzag" else x


def shard(
    x: Tensor, dim: int, axis: str, backward: str = "none", order: str = "contiguous"
) -> Tensor:
    """This rank's piece of ``dim``. ``backward`` is ``all_gather`` where every rank wants the whole
    gradient, ``pad`` where a partial sum of it is enough, ``none`` without gradient."""
    ways = transport.size(axis)
    if backward == "all_gather":
        return _apply(_Shard, to_zigzag(x, dim, ways) if order == "zigzag" else x, dim, axis)
    if order == "zigzag":
        return own_zigzag(x, dim, transport.index(axis), ways)
    return own_piece(x, dim, axis)


def all_to_all(x: Tensor, split: int, concat: int, axis: str, zigzag: int | None = None) -> Tensor:
    """``x`` is split along ``concat`` on entry and along ``split`` on exit, one of which may lie in
    ``zigzag``."""
    ways = transport.size(axis)
    x = to_zigzag(x, split, ways) if zigzag == split else x
    x = _apply(_AllToAll, x, split, concat, axis)
    return from_gathered(x, concat, ways) if zigzag == concat else x


def pad(x: Tensor, dim: int, size: int, axis: str, order: str = "contiguous") -> Tensor:
    """This rank's piece of ``dim`` with zeros where the others' are: a partial sum of ``size``."""
    if order == "zigzag":
        return among_zeros(x, dim, transport.index(axis), transport.size(axis))
    start, stop = piece(size, axis)
    around = (x.dim() - 1 - dim) * (0, 0)
    return F.pad(x, (*around, start, size - stop))


def keep_first(x: Tensor, axis: str, backward: str = "none") -> Tensor:
    """``x`` on the first rank of ``axis`` and zeros on the others: a sum that is made of ``x``.

    ``backward`` is ``keep_first`` where the gradient, too, is to become a partial sum.
    """
    return _apply(_KeepFirstBoth if backward == "keep_first" else _KeepFirst, x, axis)


def whole(x: Tensor, axis: str) -> Tensor:
    """``x`` itself; of its gradient, whole on every rank, only the first rank's counts."""
    return _apply(_Whole, x, axis)


def own_piece(x: Tensor, dim: int, axis: str) -> Tensor:
    """A view of this rank's piece of ``dim``; sizes as `torch.chunk` has them."""
    start, stop = piece(x.shape[dim], axis)
    return x.narrow(dim, start, stop - start)


def piece(size: int, *axes: str) -> tuple[int, int]:
    """(start, stop) of this rank's piece of a dim of ``size``, cut by the first axis first."""
    start, stop = 0, size
    for axis in axes:
        step = -(-(stop - start) // transport.size(axis))
        start, stop = start + transport.index(axis) * step, stop
        start, stop = min(start, stop), min(start + step, stop)
    return start, stop


def all_gather_dim(x: Tensor, dim: int, axis: str) -> Tensor:
    ways = transport.size(axis)
    stacked = transport.all_gather(x, axis)
    if math.prod(x.shape[:dim]) == 1:  # the pieces lie in memory as the whole does
        return stacked.view(*x.shape[:dim], ways * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(stacked.chunk(ways), dim)


def reduce_scatter_dim(x: Tensor, dim: int, axis: str) -> Tensor:
    if math.prod(x.shape[:dim]) == 1:
        shape = (*x.shape[:dim], x.shape[dim] // transport.size(axis), *x.shape[dim + 1 :])
        return transport.reduce_scatter(x.flatten(0, dim), axis).view(shape)
    return transport.reduce_scatter(torch.cat(x.chunk(transport.size(axis), dim)), axis)


def all_to_all_dims(x: Tensor, split: int, concat: int, axis: str) -> Tensor:
    ways = transport.size(axis)
    if math.prod(x.shape[:split]) != 1:
        x = torch.cat(x.chunk(ways, split))
        pieces = transport.all_to_all(x, axis).chunk(ways)
    else:
        shape = (*x.shape[:split], x.shape[split] // ways, *x.shape[split + 1 :])
        pieces = transport.all_to_all(x.flatten(0, split), axis).chunk(ways)
        pieces = tuple(p.reshape(shape) for p in pieces)
    return torch.cat(pieces, concat)


def apply(function: type[Function], *args: Any) -> Any:
    """``function.apply``, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def _apply(function: type[Function], *args: Any) -> Tensor:
    result: Tensor = apply(function, *args)
    return result


def _on_first(x: Tensor, axis: str) -> Tensor:
    return x.view_as(x) if transport.index(axis) == 0 else torch.zeros_like(x)


def _same(x: Tensor, axis: str) -> Tensor:
    return x.view_as(x)


def _row(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> type[Function]:
    """A row of the table: what is done to ``x``, and to its gradient, both with the dims and the
    axis of the call. Nothing else is kept, never a tensor."""

    class Row(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *where: Any) -> Tensor:
            ctx.where = where
            return forward(x, *where)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad, *ctx.where), *[None for _ in ctx.where]

    return Row


def _all_reduce(x: Tensor, axis: str) -> Tensor:
    return transport.all_reduce(x, axis)


def _all_to_all_back(x: Tensor, split: int, concat: int, axis: str) -> Tensor:
    return all_to_all_dims(x, concat, split, axis)


_AllReduce = _row(_all_reduce, lambda grad, axis: grad)
_CopyTo = _row(_same, _all_reduce)
_ReduceScatter = _row(reduce_scatter_dim, all_gather_dim)
_Gather = _row(all_gather_dim, own_piece)
_GatherPart = _row(all_gather_dim, reduce_scatter_dim)
_Shard = _row(own_piece, all_gather_dim)
_AllToAll = _row(all_to_all_dims, _all_to_all_back)
_KeepFirst = _row(_on_first, lambda grad, axis: grad)
_KeepFirstBoth = _row(_on_first, _on_first)
_Whole = _row(_same, _on_first)
