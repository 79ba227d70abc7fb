"""Which kernels make matrices of 8 bits and multiply two of them with their scales."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from autopar.nouns.recipes import ALIGNED, RECIPES, Recipe
from autopar.runtime.pytorch.kernels.fp8_cast import fp8_cast
from autopar.runtime.pytorch.scaled_operands import Tile, largest, scaled, scales, spread, tile_of
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.ops import scaled_product

ON_CPU = frozenset({"row"})
"""What scales cover where `_scaled_mm` multiplies on CPU. With one of a tensor it has the same
numbers, and two matrices of e4m3 take it hundreds of times as long as their values in float32."""
TRIED = 256
"""Side of the product that a recipe is tried on."""
AS_ROUNDED = 2e-2
"""Of the largest number: two bfloat16 results of one product, added up in other orders."""


def cast_by(recipe: Recipe, x: Tensor, scale: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """x [m, s] over its scales in 8 bits; by tensor in one kernel on CUDA."""
    if recipe.covers == "tensor" and x.is_cuda and find_spec("triton") is not None:
        q, _ = fp8_cast(x.contiguous(), dtype, "tensor", scale.reshape(()))
        return q
    return scaled(x, scale, tile, dtype)


def multiplied(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    tiles: tuple[Tile, Tile],
    recipe: Recipe,
    dtype: torch.dtype,
) -> Tensor:
    """left [a, s] right [b, s]^T over their scales -> [a, b] in ``dtype``."""
    if _has_kernel(recipe, left.device, dtype):
        return _by_kernel(left, right, left_scale, right_scale, recipe, dtype)
    return by_values(left, right, left_scale, right_scale, tiles).to(dtype)


def by_values(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, tiles: tuple[Tile, Tile]
) -> Tensor:
    """The product of what the 8-bit numbers stand for."""
    one = left.to(left_scale.dtype) * spread(left_scale, left, tiles[0])
    other = right.to(right_scale.dtype) * spread(right_scale, right, tiles[1])
    return one @ other.t()


def _has_kernel(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> bool:
    """On CPU `_scaled_mm` takes scales of tensors and rows, `ON_CPU` of which are fast; on CUDA
    those of rows in bfloat16, and scales of blocks are left to values until a device has shown how
    its library reads them."""
    if recipe.covers == "block" or device.type not in ("cpu", "cuda"):
        return False
    if device.type == "cpu":
        return recipe.covers in ON_CPU
    if recipe.covers == "row" and dtype != torch.bfloat16:
        return False
    _check_kernel(recipe.name, device)
    return True


def _by_kernel(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
) -> Tensor:
    if left.is_cuda:
        left, right = _aligned(left), _aligned(right)
    given = left_scale, right_scale.t()
    if recipe.covers == "tensor":
        given = left_scale.reshape(()), right_scale.reshape(())
    return scaled_product(
        left.contiguous(),
        right.contiguous().t(),
        scale_a=given[0].contiguous(),
        scale_b=given[1].contiguous(),
        out_dtype=dtype,
    )


def _aligned(x: Tensor) -> Tensor:
    """[a, s] with zeros behind the summed dim, which add nothing, where that is the rows of a batch
    of another size: tensor cores read 16 bytes at once."""
    short = -x.shape[1] % ALIGNED
    if not short:
        return x
    return torch.nn.functional.pad(x.view(torch.uint8), (0, short)).view(x.dtype)


@cache
def _check_kernel(name: str, device: torch.device) -> None:
    """Raises `ProgramError` where the device's kernel gives other numbers than the values do."""
    recipe, dtype = RECIPES[name], torch.float8_e4m3fn
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, TRIED, TRIED, generator=generator).to(device)
    tiles = tile_of(recipe, False), tile_of(recipe, True)
    scale = [scales(largest(x, t), dtype, recipe) for x, t in zip(drawn, tiles, strict=True)]
    one, other = (scaled(x, s, t, dtype) for x, s, t in zip(drawn, scale, tiles, strict=True))
    right = by_values(one, other, scale[0], scale[1], tiles)
    out = _by_kernel(one, other, scale[0], scale[1], recipe, torch.bfloat16)
    error = float((out.float() - right).abs().amax() / right.abs().amax())
    if error > AS_ROUNDED:
        raise ProgramError(
            f"torch's scaled product by {name} is off by {error:.2%} of its largest number on "
            f"{torch.cuda.get_device_name(device)}; plan without --fix precision={name}"
        )
