"""What narrow products give, by arithmetic alone: numbers are rounded to 8 bits and stay wide.

It shares nothing with `autopar.runtime.pytorch.scaled_products` but the recipes: rounding is by
exponents, products are those of float32 (or float64, in which `autopar verify` compares a program
on many ranks with one on one).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.nouns.recipes import Narrow, Product, Recipe

Join = Callable[[Product, Tensor], Tensor]
"""Largest magnitudes of one of a product's operands, over all ranks that have parts of it."""
_FLOATS = {"float8_e4m3fn": (3, -6, 448.0), "float8_e5m2": (2, -14, 57344.0)}
"""Bits of the mantissa, least exponent of a normal number, largest number (arXiv:2209.05433)."""
_LEAST = 1e-12
"""Largest magnitudes below count as this."""
_TIE = 2.0**-20
"""In float64, of a step of the 8-bit float: what is as near to the middle of two numbers is a tie.
What a narrow product of one scale gives are whole numbers of it, so that ties are nothing rare
where the next one reads them; ranks that add up in another order would break them otherwise."""


def rounded(x: Tensor, dtype: str) -> Tensor:
    """x as the nearest numbers of an 8-bit float, ties to even, no larger than its largest; in the
    dtype of x. In float64 what is within `_TIE` is a tie."""
    bits, least, highest = _FLOATS[dtype]
    _, above = torch.frexp(x)  # x = m 2^above with m from 0.5 to 1
    step = torch.ldexp(torch.ones_like(x), (above - 1).clamp(min=least) - bits)
    steps = x / step
    if x.dtype == torch.float64:
        steps = torch.round(steps / _TIE) * _TIE
    return (torch.round(steps) * step).clamp(-highest, highest)


def fake_scaled(
    x: Tensor, dtype: str, recipe: Recipe, weight: bool, joined: Callable[[Tensor], Tensor]
) -> Tensor:
    """x [m, s], summed along s, as a narrow product reads it: rounded over its scales."""
    m, s = x.shape
    if recipe.covers == "block":
        high, across = (recipe.weight_rows if weight else 1), recipe.block
        whole = F.pad(x, (0, -s % across, 0, -m % high))
        rows, columns = whole.shape
        tiles = whole.reshape(rows // high, high, columns // across, across)
        top = tiles.abs().amax((1, 3), keepdim=True)
    else:
        tiles = x
        top = x.abs().amax() if recipe.covers == "tensor" else x.abs().amax(1, keepdim=True)
        top = joined(top)
    scale = top.clamp(min=_LEAST) / torch.full_like(top, _FLOATS[dtype][2])
    if recipe.power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    narrow: Tensor = rounded(tiles * (1 / scale), dtype) * scale
    return narrow if recipe.covers != "block" else narrow.flatten(2, 3).flatten(0, 1)[:m, :s]


def emulated(
    product: Product,
    left: Tensor,
    right: Tensor,
    narrow: Narrow,
    joined: Join = lambda _, top: top,
) -> Tensor:
    """left [a, s] times right [b, s] transposed -> [a, b], for ``output`` of x and w, for ``input``
    of g and w^T, for ``weight`` of g^T and x^T; in float64 where they are, else in float32."""
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    one, other = left.to(wide), right.to(wide)
    if product in narrow.products:
        of_left = "float8_e4m3fn" if product == "output" else narrow.recipe.gradient

        def over_ranks(top: Tensor) -> Tensor:
            return joined(product, top)

        one = fake_scaled(one, of_left, narrow.recipe, False, over_ranks)
        of_weight = product != "weight"
        other = fake_scaled(other, "float8_e4m3fn", narrow.recipe, of_weight, over_ranks)
    return one @ other.t()
