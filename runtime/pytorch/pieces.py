"""Tensor-parallel products with their collective in pieces of rows: one is moved while another is
multiplied.

=================================================  ==================  ==================
call                                               forward             backward
=================================================  ==================  ==================
``gathered_linears(x, layers, dim, axis, n)``      all_gather          reduce_scatter
``gathered_linear(x, layer, dim, axis, n)``        all_gather          reduce_scatter
``copied_linears(x, layers, axis, n)``             nothing             all_reduce
``copied_linear(x, layer, axis, n)``               nothing             all_reduce
``linear_scattered(x, layer, dim, axis, n)``       reduce_scatter      all_gather
``linear_reduced(x, layer, axis, n)``              all_reduce          nothing
=================================================  ==================  ==================

Each is what `autopar.runtime.pytorch.collectives` and the layers give one after the other, to the
rounding of sums. A collective of all rows becomes ``pieces`` of equal size, begun as soon as there
is what they take and waited for where they are read: piece i + 1 is gathered while piece i is
multiplied, piece i is reduced while piece i + 1 is made, and in backward the last reductions go on
beside the gradients of weights, which are products of all rows at once.

A piece of a gathered dim has rows of every rank: of 2 ranks with rows 0 1 2 3 and 4 5 6 7 the first
of two pieces is 0 1 4 5. Products read it in that order; what they give is put in order again.
Kept for backward are the whole operand and the weights, never written into: it may run twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.collectives import apply
from autopar.runtime.pytorch.held_layers import Linear
from autopar.runtime.pytorch.piece_rows import Rows
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.autograd import wanted
from autopar.torch_private.tensors import version_of

Given = Tensor | None
Layer = Linear | Tensor | tuple[Tensor, Tensor]
"""A linear layer, its weight as it is computed with, or that and its bias."""
T = TypeVar("T")


def gathered_linears(
    x: Tensor, layers: Sequence[Layer], dim: int, axis: str, pieces: int
) -> tuple[Tensor, ...]:
    """What each layer gives of ``x``, its pieces of ``dim`` put together along ``axis``.

    x [..., s, ..., k] of each of w ranks -> [..., w s, ..., n] for each layer. The gradient of x
    is a partial sum on each rank, which backward adds up: a reduce-scatter in pieces.
    """
    rows = _rows("gathered_linears", x, dim, axis, pieces, x.shape[dim])
    return tuple(apply(_Gathered, x, rows, *_parts(layers)))


def gathered_linear(x: Tensor, layer: Layer, dim: int, axis: str, pieces: int) -> Tensor:
    """`gathered_linears` of one layer."""
    (result,) = gathered_linears(x, (layer,), dim, axis, pieces)
    return result


def copied_linears(
    x: Tensor, layers: Sequence[Layer], axis: str, pieces: int
) -> tuple[Tensor, ...]:
    """What each layer gives of ``x`` [..., k], which every rank of ``axis`` has; backward adds up
    the partial sums of its gradient in pieces."""
    _check_rows("copied_linears", x, pieces)
    return tuple(apply(_Copied, x, axis, pieces, *_parts(layers)))


def copied_linear(x: Tensor, layer: Layer, axis: str, pieces: int) -> Tensor:
    """`copied_linears` of one layer."""
    (result,) = copied_linears(x, (layer,), axis, pieces)
    return result


def linear_scattered(x: Tensor, layer: Layer, dim: int, axis: str, pieces: int) -> Tensor:
    """The sum over ``axis`` of what ``layer``, whose ranks have pieces of k, gives of ``x``; each
    keeps its piece of ``dim``: x [..., w s, ..., k] -> [..., s, ..., n]."""
    weight = _alone("linear_scattered", layer)
    ways = transport.size(axis)
    _divides("linear_scattered", x.shape[dim], ways, f"places of dim {dim}", f"ranks of {axis}")
    rows = _rows("linear_scattered", x, dim, axis, pieces, x.shape[dim] // ways)
    result: Tensor = apply(_Scattered, x, weight, rows)
    return result


def linear_reduced(x: Tensor, layer: Layer, axis: str, pieces: int) -> Tensor:
    """The sum over ``axis`` of what ``layer``, whose ranks have pieces of k, gives of ``x``:
    x [..., k] -> [..., n], whole on every rank."""
    weight = _alone("linear_reduced", layer)
    _check_rows("linear_reduced", x, pieces)
    result: Tensor = apply(_Reduced, x, weight, axis, pieces)
    return result


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, *parts: Given) -> tuple[Tensor, ...]:
        layers = [(w, b) for w, b in _pairs(parts) if w is not None]
        keeps = any(ctx.needs_input_grad[2::2])  # gradients of weights alone read it
        whole: Given = None
        made: list[Given] = [None for _ in layers]
        for i, piece in enumerate(rows.each_gathered(x)):
            whole = rows.put(whole, piece, i) if keeps else None
            results = (F.linear(piece, weight, bias) for weight, bias in layers)
            made = [rows.put(one, own, i) for one, own in zip(made, results, strict=True)]
        ctx.rows, ctx.tensors = rows, _tensors(x, rows, *parts)
        ctx.save_for_backward(whole, *(weight for weight, _ in layers))
        return tuple(one for one in made if one is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows: Rows = ctx.rows
        of_x, _, *of_parts = wanted(ctx, ctx.tensors)
        coming = []
        for i in range(rows.pieces) if of_x else ():
            coming.append(rows.begin_scatter(_back([rows.whole(g, i) for g in grads], weights)))
        parts = [*_of_parts(of_parts, x, grads)]  # beside the last reductions
        return (rows.scattered(coming) if coming else None), None, *parts


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, pieces: int, *parts: Given) -> tuple[Tensor, ...]:
        layers = [(w, b) for w, b in _pairs(parts) if w is not None]
        ctx.where, ctx.tensors = (axis, pieces), _tensors(x, axis, pieces, *parts)
        kept = x if any(ctx.needs_input_grad[3::2]) else None
        ctx.save_for_backward(kept, *(weight for weight, _ in layers))
        return tuple(F.linear(x, weight, bias) for weight, bias in layers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        coming: list[Tensor] = []
        axis, pieces = ctx.where
        of_x, _, _, *of_parts = wanted(ctx, ctx.tensors)
        if of_x:
            cut = zip(*(_of_rows(g, pieces) for g in grads), strict=True)
            coming = [transport.begin_all_reduce(_back(some, weights), axis) for some in cut]
        parts = [*_of_parts(of_parts, x, grads)]
        return (_reduced(coming, grads[0].shape) if coming else None), None, None, *parts


class _Scattered(Function):
    """Where a backward is in two, the gradient that the first one gathers is kept for the second,
    which is known by what it is given: the same gradient, unwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.tensors, ctx.kept = rows, _tensors(x, weight, rows), None
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        every = (rows.whole(x, i) for i in range(rows.pieces))
        return rows.scattered([rows.begin_scatter(F.linear(piece, weight)) for piece in every])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows: Rows = ctx.rows
        of_x, of_weight, _ = wanted(ctx, ctx.tensors)
        kept, ctx.kept = ctx.kept, None
        if kept is not None and kept.of(grad) and not of_x:
            return None, _of_weight(kept.whole, x) if of_weight else None, None
        later = ctx.needs_input_grad[1] and not of_weight
        made: Given = None
        whole: Given = None
        for i, piece in enumerate(rows.each_gathered(grad)):
            whole = rows.put(whole, piece, i) if of_weight or later else None
            made = rows.put(made, piece @ weight, i) if of_x else None
        if later and whole is not None:
            ctx.kept = _Kept(grad, version_of(grad), whole)
        part = _of_weight(whole, x) if of_weight and whole is not None else None
        return made, part, None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A gradient, how often it was written then, and what it is of all ranks together."""

    grad: Tensor
    version: int
    whole: Tensor

    def of(self, grad: Tensor) -> bool:
        same = grad.data_ptr() == self.grad.data_ptr() and grad.stride() == self.grad.stride()
        written = version_of(self.grad) != self.version
        return same and grad.shape == self.grad.shape and not written


class _Reduced(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: str, pieces: int) -> Tensor:
        ctx.tensors = _tensors(x, weight, axis, pieces)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        every = (F.linear(piece, weight) for piece in _of_rows(x, pieces))
        coming = [transport.begin_all_reduce(piece, axis) for piece in every]
        return _reduced(coming, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, *_ = wanted(ctx, ctx.tensors)
        given = grad @ weight if of_x else None
        return given, _of_weight(grad, x) if of_weight else None, None, None


def _tensors(*arguments: object) -> tuple[bool, ...]:
    return tuple(isinstance(one, Tensor) for one in arguments)


def _of_rows(x: Tensor, pieces: int) -> tuple[Tensor, ...]:
    """Pieces of rows [r, c], as equal as they can be; of fewer rows than pieces each is one."""
    rows = x.flatten(0, -2)
    return rows.tensor_split(max(1, min(pieces, rows.shape[0])))


def _reduced(coming: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """All pieces of rows, in a tensor whose dims but the last are those of ``shape``."""
    every = torch.cat([transport.wait(one) for one in coming])
    return every.view(*shape[:-1], every.shape[-1])


def _back(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of what several products read, of theirs [..., n]: [..., k]."""
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total = total + grad @ weight
    return total


def _of_parts(wanted: Sequence[bool], x: Given, grads: Sequence[Tensor]) -> Iterator[Given]:
    """The gradients of weight and bias of every layer, None of those that are not wanted."""
    for grad, (of_weight, of_bias) in zip(grads, _pairs(wanted), strict=True):
        yield _of_weight(grad, x) if of_weight and x is not None else None
        yield grad.flatten(0, -2).sum(0) if of_bias else None


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """[..., n] and [..., k] -> [n, k]"""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _parts(layers: Sequence[Layer]) -> Iterator[Given]:
    """Weight and bias of every layer, one after the other, as they are computed with."""
    for layer in layers:
        yield from layer_parts(layer)


def layer_parts(layer: Layer) -> tuple[Tensor, Given]:
    """Weight and bias as they are computed with."""
    if isinstance(layer, Linear):
        return layer.own()
    return (layer, None) if isinstance(layer, Tensor) else layer


def _pairs(parts: Sequence[T]) -> list[tuple[T, T]]:
    return [*zip(parts[::2], parts[1::2], strict=True)]


def _alone(call: str, layer: Layer) -> Tensor:
    """The weight of a layer without a bias, which every rank would add."""
    weight, bias = layer_parts(layer)
    if bias is not None:
        raise ProgramError(f"{call}: ranks add up what the layer gives, so add its bias afterwards")
    return weight


def _rows(call: str, x: Tensor, dim: int, axis: str, pieces: int, part: int) -> Rows:
    if not 0 <= dim < x.dim() - 1:
        raise ProgramError(f"{call}: dim {dim} of {list(x.shape)} is none of its rows")
    _divides(call, part, pieces, f"places of dim {dim} on a rank")
    return Rows(axis, dim, transport.size(axis), pieces, part)


def _check_rows(call: str, x: Tensor, pieces: int) -> None:
    if pieces < 1 or x.dim() < 2:
        raise ProgramError(f"{call}: {pieces} pieces of the rows of {list(x.shape)}")


def _divides(call: str, size: int, ways: int, of: str, into: str = "pieces") -> None:
    if ways < 1 or size % ways:
        raise ProgramError(f"{call}: {ways} {into} do not divide {size} {of}")
