"""Recipes by which a linear layer's products run in 8 bits.

With rows x [r, k], weight w [n, k] and the gradient g [r, n] of the result, a layer has three
products, each summed over one dim:

==========  ===============  ===========
product     what             summed over
==========  ===============  ===========
``output``  x w^T   [r, n]   k
``input``   g w     [r, k]   n
``weight``  g^T x   [n, k]   r
==========  ===============  ===========

Both operands of a narrow product are divided by scales, rounded to 8 bits, multiplied and summed in
float32. A scale is the largest magnitude of what it covers over the largest number of the dtype:

===========  =============================================================  ========  ============
recipe       a scale covers                                                 x and w   g
===========  =============================================================  ========  ============
fp8-tensor   a whole operand                                                e4m3      e5m2
fp8-row      a row along the summed dim                                     e4m3      e4m3
fp8-block    128 numbers along the summed dim; of w 128 x 128               e4m3      e4m3
mxfp8        32 numbers along the summed dim, rounded up to a power of two  e4m3      e4m3
===========  =============================================================  ========  ============

Sources: Micikevicius et al., arXiv:2209.05433 (e5m2 where gradients are), torchao's `tensorwise`;
torchao's `rowwise`, whose scales are besides rounded to powers of two, and `rowwise_with_gw_hp`,
which is ``fp8-row:output+input``; DeepSeek-V3, arXiv:2412.19437, section 3.3; OCP's Microscaling
Formats 1.0 with the rounding of Mishra et al., arXiv:2506.08027.

A recipe for some of the products is written with them: ``fp8-row:output+input``. The rest has the
dtype of compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from autopar.nouns.graph import DTYPE_BYTES

Product = Literal["output", "input", "weight"]
PRODUCTS: tuple[Product, ...] = ("output", "input", "weight")
SUMMED: Mapping[Product, str] = MappingProxyType({"output": "k", "input": "n", "weight": "rows"})
"""The dim that a product is summed over; scales of rows and blocks lie along it."""
ALIGNED = 16
"""Both dims of a narrow product's operands are multiples of it: 16 bytes, which the loads of
tensor cores take at once (torch's `_scaled_mm` refuses others on CUDA)."""
Covers = Literal["tensor", "row", "block"]
GATHERED = "float8_e4m3fn"
"""The dtype of weights on their way to ranks, where they are gathered in 8 bits
(`autopar.rules.narrow_gathers`)."""
MOVED_BYTES: Mapping[str, int] = MappingProxyType({**DTYPE_BYTES, GATHERED: 1})
"""Of an element on its way: no tensor of a graph is in 8 bits."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """covers:   what shares a scale; ``block``: of so many numbers along the summed dim.
    weight_rows: of a weight, blocks are so many rows high, too.
    gradient:    dtype of gradients; all else is ``float8_e4m3fn``.
    power_of_two: scales are rounded up to powers of two."""

    name: str
    covers: Covers
    gradient: str = "float8_e4m3fn"
    block: int = 0
    weight_rows: int = 1
    power_of_two: bool = False

    def multiples(self, product: Product) -> dict[str, int]:
        """By dim what is to divide it: n and k are dims of tensors in 8 bits, blocks end where dims
        do, and where rows are summed they are as k is to the output."""
        dims = {"n": ALIGNED, "k": ALIGNED} | {SUMMED[product]: max(ALIGNED, self.block)}
        if self.weight_rows > 1 and product != "weight":
            dims.update(n=self.weight_rows, k=self.weight_rows)
        return dims


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        r.name: r
        for r in (
            Recipe("fp8-tensor", "tensor", "float8_e5m2"),
            Recipe("fp8-row", "row"),
            Recipe("fp8-block", "block", block=128, weight_rows=128),
            Recipe("mxfp8", "block", block=32, power_of_two=True),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Narrow:
    """A recipe and the products that run by it, in the order of `PRODUCTS`."""

    recipe: Recipe
    products: tuple[Product, ...] = PRODUCTS

    def __str__(self) -> str:
        if self.products == PRODUCTS:
            return self.recipe.name
        return f"{self.recipe.name}:{'+'.join(self.products)}"

    @staticmethod
    def parse(text: str) -> Narrow:
        """The inverse of ``str``.

        Raises:
            ValueError: no such recipe, or products that are none, come twice or out of order.
        """
        name, _, listed = text.partition(":")
        if name not in RECIPES:
            raise ValueError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
        asked = listed.split("+") if listed else list(PRODUCTS)
        products = tuple(p for p in PRODUCTS if p in asked)
        if list(products) != asked or (":" in text and not listed):
            raise ValueError(
                f"{text!r}: products are some of {', '.join(PRODUCTS)} in this order, as "
                f"{name}:output+input"
            )
        return Narrow(RECIPES[name], products)


def recipes_text(recipes: Mapping[str, str] | None) -> str:
    """``7 by fp8-row, 1 by fp8-row:output``: how many kinds of layers run by which; ``none``."""
    counts: dict[str, int] = {}
    for text in (recipes or {}).values():
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{counts[text]} by {text}" for text in sorted(counts)) or "none"
