"""Weights that FSDP2 gathers in 8 bits (`autopar.rules.narrow_gathers`).

Before the first forward of a step the ranks that have pieces of a weight join its largest
magnitude, those of all weights in one all-reduce. Each rank then rounds its piece over the scale of
the whole, as often as it is gathered, in the dtype of compute first: to the bit what
`scaled_linear` makes of a weight that is gathered in that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.nouns.recipes import GATHERED, RECIPES
from autopar.runtime.pytorch.counting import not_counted
from autopar.runtime.pytorch.narrow_weight import NarrowWeight, wide
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.scaled_kernels import cast_by
from autopar.runtime.pytorch.scaled_operands import scales, tile_of
from autopar.runtime.pytorch.scaled_products import compared_with
from autopar.runtime.pytorch.scaled_reference import fake_scaled
from autopar.torch_private.distributed import fsdp_gathers_by

_RECIPE = RECIPES["fp8-tensor"]
_TILE = tile_of(_RECIPE, True)
_DTYPE: torch.dtype = getattr(torch, GATHERED)


@dataclass(slots=True)
class _Weight:
    """This rank's piece, the axes whose ranks have the others, rows of the whole, the dtype that
    products have it in, and the magnitude of the whole."""

    piece: Tensor
    axes: tuple[str, ...]
    rows: int
    to: torch.dtype
    top: Tensor


class NarrowGathers:
    """Of the weights of one model."""

    def __init__(
        self,
        weights: Mapping[str, tuple[DTensor, tuple[str, ...]]],
        ranks: Ranks,
        precision: torch.dtype,
    ) -> None:
        """weights: as FSDP2 has them, by name, with the axes whose ranks have pieces of each;
        ``precision``: what takes the place of float32."""
        self._ranks = ranks
        self._precision = precision
        self._stale = True
        self._weights = [self._of(*weight) for weight in weights.values()]

    def _of(self, parameter: DTensor, axes: tuple[str, ...]) -> _Weight:
        piece = parameter.to_local().detach()
        top = torch.zeros((1, 1), device=piece.device)
        to = self._precision if parameter.dtype is torch.float32 else parameter.dtype
        weight = _Weight(piece, axes, parameter.shape[0], to, top)
        padded = -(-weight.rows // parameter.device_mesh.shape[-1])

        def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
            return (self._narrow(weight, padded),), weight.top

        def after(gathered: Any, top: Tensor, dtype: Any, out: NarrowWeight | None = None) -> Any:
            if out is not None:  # its values are memory of what is gathered each time
                out.top = top
                return None
            values = gathered[0][: weight.rows]
            return NarrowWeight(values, top, to), ()

        fsdp_gathers_by(parameter, before, after)
        return weight

    def change(self) -> None:
        """The weights have changed, or may have."""
        self._stale = True

    @torch.no_grad()
    def join(self) -> None:
        """Largest magnitudes of the whole weights, where they have changed. All ranks call it."""
        if not self._stale:
            return
        self._stale = False
        for axes, weights in self._together():
            tops = torch.stack([_largest(weight.piece, weight.to) for weight in weights])
            dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=self._ranks.group(*axes))
            for weight, top in zip(weights, tops, strict=True):
                weight.top = top.reshape(1, 1)

    def _together(self) -> Iterator[tuple[tuple[str, ...], list[_Weight]]]:
        groups: dict[tuple[str, ...], list[_Weight]] = {}
        for weight in self._weights:
            groups.setdefault(weight.axes, []).append(weight)
        yield from groups.items()

    def _narrow(self, weight: _Weight, rows: int) -> Tensor:
        """The piece in 8 bits, with zeros behind it where others have a row more."""
        values = weight.piece.to(weight.to)
        made = cast_by(_RECIPE, values, scales(weight.top, _DTYPE, _RECIPE), _TILE, _DTYPE)
        compared_with(lambda: self._right(weight, values), lambda: wide(made, weight.top))
        if made.shape[0] == rows:
            return made
        padded = made.new_zeros((rows, made.shape[1]), dtype=torch.uint8)
        padded[: made.shape[0]] = made.view(torch.uint8)
        return padded.view(_DTYPE)

    def _right(self, weight: _Weight, values: Tensor) -> Tensor:
        """The piece rounded by arithmetic alone, over what its ranks have now."""

        def joined(top: Tensor) -> Tensor:
            with not_counted():
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self._ranks.group(*weight.axes))
            return top

        if not values.numel():  # the others wait for this rank's maximum
            joined(torch.zeros((), device=values.device))
            return values.float()
        return fake_scaled(values.float(), GATHERED, _RECIPE, True, joined)


def _largest(piece: Tensor, to: torch.dtype) -> Tensor:
    """In float32, of the numbers that the piece has in the dtype of compute."""
    if not piece.numel():
        return torch.zeros((), device=piece.device)
    top: Tensor = torch.linalg.vector_norm(piece, torch.inf)
    return top.to(to).float()
