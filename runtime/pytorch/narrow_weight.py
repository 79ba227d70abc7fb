"""A weight that came in 8 bits: its layer alone reads it, and multiplies what came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.nouns.recipes import RECIPES
from autopar.runtime.pytorch.scaled_operands import scales
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.tensors import without_memory

_aten = torch.ops.aten
_SAME = frozenset({_aten.detach.default, _aten.alias.default})
_RECIPE = RECIPES["fp8-tensor"]
_SHAPED = frozenset({_aten.as_strided.default, _aten.view.default})
"""The same where they ask for the shape that there is: FSDP2 takes what came as it was laid out,
and autograd makes a view of what it is to know the gradient of."""


def wide(rounded: Tensor, top: Tensor) -> Tensor:
    """In float32 what a weight in 8 bits stands for, of this largest magnitude."""
    return rounded.float() * scales(top, rounded.dtype, _RECIPE)


class NarrowWeight(Tensor):
    """[n, k] for autograd, in the dtype of compute; no memory but that of ``rounded``.

    rounded: float8_e4m3fn [n, k], the weight over the scale that follows from ``top``, its largest
            magnitude, [1, 1] in float32.
    """

    rounded: Tensor
    top: Tensor

    @staticmethod
    def __new__(cls, rounded: Tensor, top: Tensor, dtype: torch.dtype) -> NarrowWeight:
        made: NarrowWeight = without_memory(
            cls, rounded.shape, strides=rounded.stride(), dtype=dtype, device=rounded.device
        )
        made.rounded, made.top = rounded, top
        return made

    def __init__(self, rounded: Tensor, top: Tensor, dtype: torch.dtype) -> None:
        """All is done by `__new__`."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"NarrowWeight({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        weight = args[0]
        if isinstance(weight, NarrowWeight):
            as_it_is = func in _SHAPED and tuple(args[1]) == weight.shape
            if func in _SAME or as_it_is:
                return NarrowWeight(weight.rounded, weight.top, weight.dtype)
            if func is _aten.zeros_like.default:  # a gradient that nothing gave
                return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
            if func is _aten.t.default:
                return NarrowWeight(weight.rounded.t(), weight.top, weight.dtype)
        raise ProgramError(
            f"{func} reads a weight that is gathered in 8 bits, and `scaled_linear` alone knows "
            "its scale; leave its name out of SETTINGS.narrow, or plan with --fix gather=compute"
        )
