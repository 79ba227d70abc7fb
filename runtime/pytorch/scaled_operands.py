"""Operands of a narrow product: scaled into the range of an 8-bit float and rounded to it.

An operand [m, s] is summed along its last dim. `largest` finds what scales are made of, which may
be joined with other ranks', and `scaled` rounds. By tensor and by row it gives the bits of
`autopar.runtime.pytorch.kernels.fp8_cast`, which is one kernel where triton runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.nouns.recipes import Recipe
from autopar.runtime.pytorch.kernels.fp8_cast import SMALLEST


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of an operand that share a scale; 0: all of them."""

    rows: int
    columns: int


def tile_of(recipe: Recipe, weight: bool) -> Tile:
    """Of an operand; ``weight``: it is the layer's weight, whichever of its dims is summed."""
    if recipe.covers == "tensor":
        return Tile(0, 0)
    if recipe.covers == "row":
        return Tile(1, 0)
    return Tile(recipe.weight_rows if weight else 1, recipe.block)


def largest(x: Tensor, tile: Tile) -> Tensor:
    """Largest magnitudes of the tiles of x [m, s] -> [m / rows, s / columns], in float32 at least.

    Last tiles may be smaller.
    """
    m, s = x.shape
    if not tile.columns:  # one pass, where the magnitudes of all tiles would be written
        norm: Callable[..., Tensor] = torch.linalg.vector_norm
        top = norm(x.detach(), torch.inf, 1, True) if tile.rows else norm(x.detach(), torch.inf)
        return top.reshape(-1, 1).to(_wide(x.dtype))
    rows, columns = tile.rows, tile.columns
    wide = x.detach().abs()
    if m % rows or s % columns:
        wide = torch.nn.functional.pad(wide, (0, -s % columns, 0, -m % rows))
    m, s = wide.shape
    tiles = wide.reshape(m // rows, rows, s // columns, columns)
    return tiles.amax((1, 3)).to(_wide(x.dtype))


def scales(largest: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """What tiles of these largest magnitudes are divided by."""
    highest = torch.full_like(largest, torch.finfo(dtype).max)
    scale = largest.clamp(min=SMALLEST) / highest
    if not recipe.power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)  # in [0.5, 1), so that this is the power above
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(scale), power)


def scaled(x: Tensor, scale: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """x [m, s] over the scales of its tiles, rounded to ``dtype``; what is then too large becomes
    the largest number."""
    high = torch.finfo(dtype).max
    wide = x.detach().to(scale.dtype) * spread(1 / scale, x, tile)
    return wide.clamp(-high, high).to(dtype)


def spread(of_tiles: Tensor, x: Tensor, tile: Tile) -> Tensor:
    """A number of each tile at every place of x, or so that it broadcasts there."""
    m, s = x.shape
    if tile.rows > 1:
        of_tiles = of_tiles.repeat_interleave(tile.rows, 0)[:m]
    if tile.columns:
        of_tiles = of_tiles.repeat_interleave(tile.columns, 1)[:, :s]
    return of_tiles


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
