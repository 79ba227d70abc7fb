"""Linear layers whose products run in 8 bits (`autopar.nouns.recipes`).

A narrow product is torch's `_scaled_mm` where it has the recipe for the device, and is fast: by
tensor on CUDA, by row on CPU too. Elsewhere operands are rounded all the same, and their
values multiplied in float32. The first product of a recipe on a CUDA device is compared with that,
so that scales which a library reads otherwise are an error and no wrong numbers.

Where ranks have parts of what a scale covers, largest magnitudes are joined over them (one
all-reduce of maxima for each product), so that numbers are those of one rank. Ranks of data axes,
and microbatches, have samples of their own, and scales too: a tensor is what a rank has of a
microbatch, as torchao and Transformer Engine have it.

Nothing that is given is written into, and backward may run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.nouns.recipes import PRODUCTS, SUMMED, Narrow, Product
from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.collectives import apply
from autopar.runtime.pytorch.counting import not_counted
from autopar.runtime.pytorch.held_layers import Linear
from autopar.runtime.pytorch.narrow_weight import NarrowWeight, wide
from autopar.runtime.pytorch.scaled_op import scaled_product
from autopar.runtime.pytorch.scaled_operands import Tile, largest, tile_of
from autopar.runtime.pytorch.scaled_reference import emulated
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.ops import will_run

Axes = str | tuple[str, ...]
Way = Literal["narrow", "whole", "emulated"]
_way: ContextVar[Way] = ContextVar("_way", default="narrow")
WIDE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of compute."""


@dataclass(slots=True)
class Seen:
    """What narrow products gave beside `emulated`, at most, relative to the largest number of it;
    ``calls`` of layers by recipe."""

    error: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)


_seen: ContextVar[Seen | None] = ContextVar("_seen", default=None)


@contextmanager
def products_as(way: Way) -> Iterator[None]:
    """Inside, what runs in float64 has its products ``whole``, or rounded and ``emulated``."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


@contextmanager
def compared() -> Iterator[Seen]:
    """Inside, each narrow product is compared with its emulation."""
    seen = Seen()
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def compared_with(right: Callable[[], Tensor], made: Callable[[], Tensor]) -> None:
    """Inside of `compared`, one more thing that is to be the same."""
    seen = _seen.get()
    if seen is not None:
        _compare(made(), right(), seen)


def scaled_linear(
    x: Tensor,
    weight: Tensor | Linear,
    bias: Tensor | None = None,
    *,
    recipe: str,
    k: Axes = (),
    n: Axes = (),
    rows: Axes = (),
) -> Tensor:
    """``x weight^T + bias`` by ``recipe``, for some of its products as ``fp8-row:output+input``.

    x [..., k], weight [n, k] (or the layer that holds it and the bias), bias [n] -> [..., n], all
    of one dtype. ``k``, ``n``, ``rows``: axes whose ranks have pieces of that dim, and share scales
    that cover it. Rows may be any number: plans take a multiple of 16, and a smaller batch has
    what it has.

    Raises:
        ProgramError: n or k that no narrow product takes, or dtypes that differ.
    """
    if isinstance(weight, Linear):
        weight, bias = weight.own()
    narrow, axes = Narrow.parse(recipe), {"k": _tuple(k), "n": _tuple(n), "rows": _tuple(rows)}
    rows_of_x = x.reshape(-1, x.shape[-1])
    way = _way.get()
    if way == "whole" and x.dtype == torch.float64:
        return F.linear(x, weight, bias)
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    _check(rows_of_x, weight, narrow, way, trains)
    how = _How(narrow, axes, way, _seen.get())
    if how.seen is not None:
        how.seen.calls[recipe] = how.seen.calls.get(recipe, 0) + 1
    out: Tensor = apply(_ScaledLinear, rows_of_x, weight, how)
    out = out if bias is None else out + bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _tuple(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _check(x: Tensor, weight: Tensor, narrow: Narrow, way: Way, trains: bool) -> None:
    given = f"x {list(x.shape)} in {x.dtype} and weight {list(weight.shape)} in {weight.dtype}"
    if x.dtype != weight.dtype:
        raise ProgramError(f"{narrow}: {given}; both have one dtype")
    if x.dtype not in WIDE and not (way == "emulated" and x.dtype == torch.float64):
        raise ProgramError(
            f"{narrow}: {given}; products are scaled from float32, bfloat16, float16"
        )
    sizes = {"n": weight.shape[0], "k": weight.shape[1]}
    wanted = {"output": True, "input": x.requires_grad, "weight": weight.requires_grad}
    for product in narrow.products:
        least = narrow.recipe.multiples(product)
        wrong = [
            f"{dim} = {sizes[dim]} is no multiple of {by}"
            for dim, by in least.items()
            if dim in sizes and sizes[dim] % by  # rows are as many as a batch has
        ]
        if wrong and (product == "output" or (trains and wanted[product])):
            raise ProgramError(
                f"{narrow}: {given} cannot have its {product} in 8 bits: "
                f"{' and '.join(wrong)}; leave the layer in the dtype of compute, or pad its sizes"
            )


@dataclass(frozen=True, slots=True)
class _How:
    """``axes``: of pieces by dim; ``seen``: what comparisons go to, if any."""

    narrow: Narrow
    axes: dict[str, tuple[str, ...]]
    way: Way
    seen: Seen | None

    def joined(self, product: Product) -> tuple[str, ...]:
        """Axes over which the largest magnitudes of a product's operands are joined."""
        if self.narrow.recipe.covers == "block":
            return ()  # blocks end where pieces do
        if self.narrow.recipe.covers == "row":
            return self.axes[SUMMED[product]]
        return tuple(dict.fromkeys(a for axes in self.axes.values() for a in axes))

    def tops(self, product: Product, *tops: Tensor) -> list[Tensor]:
        """Largest magnitudes, joined in one all-reduce for each axis."""
        axes = self.joined(product)
        if not axes:
            return list(tops)
        flat = torch.cat([top.reshape(-1) for top in tops])
        for axis in axes:
            flat = transport.all_reduce(flat, axis, "max")
        parts = torch.split(flat, [top.numel() for top in tops])
        return [part.view(top.shape) for part, top in zip(parts, tops, strict=True)]


class _ScaledLinear(Function):
    """x [r, k], weight [n, k] -> [r, n]. Both are kept, and made narrow again in backward, but for
    a weight that came in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: _How) -> Tensor:
        ctx.how = how
        ctx.tops = {}
        ctx.save_for_backward(x, weight)
        return _product("output", x, weight, how, ctx.tops)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if will_run(ctx, 0):
            of_x = _product("input", grad, weight.t(), ctx.how, ctx.tops)
        if will_run(ctx, 1):
            of_weight = _product("weight", grad.t(), x.t(), ctx.how, ctx.tops)
        return of_x, of_weight, None


_OPERANDS = {"output": ("x", "w"), "input": ("g", "w"), "weight": ("g", "x")}


def _product(
    product: Product, left: Tensor, right: Tensor, how: _How, tops: dict[str, Tensor]
) -> Tensor:
    """left [a, s] right [b, s]^T -> [a, b]. ``tops``: largest magnitudes of whole operands by name,
    which a recipe by tensor has from the forward for the backward. That of g is made for each of
    its products, which pipelines may run apart."""
    narrow = how.narrow
    if how.way == "emulated":
        return emulated(product, left, right, narrow, _join(how)).to(left.dtype)
    if product not in narrow.products:
        return left @ right.t()
    known = _tops(product, left, right, how, tops)
    given = right.rounded if isinstance(right, NarrowWeight) else right
    out = scaled_product(left, given, known, narrow.recipe.name, product)
    if how.seen is not None:
        with not_counted():
            right_values = emulated(product, left, _wide(right), narrow, _join(how))
        _compare(out, right_values, how.seen)
    return out


def _tops(
    product: Product, left: Tensor, right: Tensor, how: _How, tops: dict[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """What scales cover that other ranks have parts of, or other products read; None: nothing."""
    recipe = how.narrow.recipe
    if recipe.covers != "tensor":
        if not how.joined(product):
            return None
        tiles = tile_of(recipe, False), tile_of(recipe, product != "weight")
        one, other = how.tops(product, largest(left, tiles[0]), largest(right, tiles[1]))
        return one, other
    own = dict(zip(_OPERANDS[product], (left, right), strict=True))
    new = {name: _largest(x) for name, x in own.items() if name not in tops}
    known = {**tops, **dict(zip(new, how.tops(product, *new.values()), strict=True))}
    if product == "output":
        tops.update(known)
    one, other = (known[name] for name in own)
    return one, other


def _largest(x: Tensor) -> Tensor:
    return x.top if isinstance(x, NarrowWeight) else largest(x, Tile(0, 0))


def _wide(x: Tensor) -> Tensor:
    """An operand, or in float32 what came in 8 bits stands for."""
    if not isinstance(x, NarrowWeight):
        return x
    return wide(x.rounded, x.top)


def _join(how: _How) -> Any:
    def joined(product: Product, top: Tensor) -> Tensor:
        return how.tops(product, top)[0]

    return joined


def _compare(out: Tensor, right: Tensor, seen: Seen) -> None:
    if not out.numel():
        return
    apart = (out.to(right.dtype) - right).abs().amax()
    least = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    apart = (apart - least / 2).clamp(min=0)  # the steps of numbers below the normal ones
    seen.error = max(seen.error, float(apart / right.abs().amax().clamp(min=1e-30)))


assert set(_OPERANDS) == set(PRODUCTS)
