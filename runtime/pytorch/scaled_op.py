"""A narrow product as one op of torch's dispatcher: where blocks run again in backward and keep
what products gave, they keep this, and cast nothing again."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.nouns.recipes import RECIPES, Product
from autopar.runtime.pytorch.scaled_kernels import cast_by, multiplied
from autopar.runtime.pytorch.scaled_operands import largest, scales, tile_of

NAME = "autopar::scaled_product"
torch.library.define(
    NAME,
    "(Tensor left, Tensor right, Tensor? left_top, Tensor? right_top, str recipe, str product) "
    "-> Tensor",
)


def scaled_product(
    left: Tensor,
    right: Tensor,
    tops: tuple[Tensor, Tensor] | None,
    recipe: str,
    product: Product,
) -> Tensor:
    """left [a, s] right [b, s]^T -> [a, b] in the dtype of left, both in 8 bits. ``tops``: largest
    magnitudes of what scales cover, where they are known; else those of the operands. ``right``
    may be in 8 bits already, over the scale of its ``tops``."""
    given = tops or (None, None)
    made: Tensor = torch.ops.autopar.scaled_product(left, right, *given, recipe, product)
    return made


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _product(
    left: Tensor,
    right: Tensor,
    left_top: Tensor | None,
    right_top: Tensor | None,
    recipe: str,
    product: Product,
) -> Tensor:
    how = RECIPES[recipe]
    dtypes = torch.float8_e4m3fn, torch.float8_e4m3fn
    if product != "output":
        dtypes = getattr(torch, how.gradient), torch.float8_e4m3fn
    tiles = tile_of(how, False), tile_of(how, product != "weight")
    cast, scale = [], []
    for x, top, tile, dtype in zip(
        (left, right), (left_top, right_top), tiles, dtypes, strict=True
    ):
        scale.append(scales(largest(x, tile) if top is None else top, dtype, how))
        is_narrow = x.dtype == dtype
        cast.append(x if is_narrow else cast_by(how, x, scale[-1], tile, dtype))
    return multiplied(cast[0], cast[1], scale[0], scale[1], tiles, how, left.dtype)


@torch.library.register_fake(NAME)  # type: ignore[untyped-decorator]
def _like(
    left: Tensor,
    right: Tensor,
    left_top: Tensor | None,
    right_top: Tensor | None,
    recipe: str,
    product: str,
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]))
