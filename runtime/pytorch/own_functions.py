"""Hand-written derivatives of the model (`torch.autograd.Function`) in an emitted program.

The class stays where the user has it and is found by the name of its module; a program is run
where the model's file is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar.frontends.shared.named_functions import function_at

_scale = 1.0


def own_function(path: str, *args: Any, whole_gradient: bool = False) -> Any:
    """``apply`` of the function at ``"module:Name"``, its tensors alone where it returns more.

    ``whole_gradient``: its backward is not linear in the gradient, so it gets the loss's own even
    where the trainer scales that.
    """
    function: Any = function_at(path)
    scaled = whole_gradient and _scale != 1.0 and torch.is_grad_enabled()
    if scaled:
        args = tuple(_times(a, _scale) for a in args)
    made = function.apply(*args)
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    if scaled:
        tensors = [_times(t, 1 / _scale) for t in tensors]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _times(value: Any, scale: float) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return _Scaled.apply(value, scale)  # type: ignore[no-untyped-call]
    return value


@contextmanager
def gradients_scaled(scale: float) -> Iterator[None]:
    """Inside, gradients that flow back are ``scale`` times the loss's; `own_function` hands the
    plain ones to backwards that users wrote, which may well compare them with a bound."""
    global _scale
    before, _scale = _scale, scale
    try:
        yield
    finally:
        _scale = before


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient ``scale`` times as large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale, None
