"""Functions of torch that look at values before they compute, as what they compute.

A capture has no values. What a function checks (a variance below nothing, weights that are
negative) is the model's on one device; calls with arguments that are not here stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cov(input: Tensor, *, correction: int = 1) -> Tensor:
    """Variables [v, n], or one [n] -> [v, v], or a number."""
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    less = rows - rows.mean(1, keepdim=True)
    return (less @ less.t() / max(0, rows.shape[1] - correction)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """`cov` over both standard deviations, between -1 and 1."""
    both = cov(input)
    if both.dim() == 0:
        return both / both
    deviation = both.diagonal().sqrt()
    return (both / deviation.unsqueeze(1) / deviation.unsqueeze(0)).clamp(-1, 1)


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """``(log(var) + (input - target)^2 / var) / 2``: a variance counts as ``eps`` at least, whose
    gradient is that of itself."""
    if var.dim() + 1 == input.dim():  # of each row one
        var = var.unsqueeze(-1)
    least = torch.where(var < eps, eps + (var - var.detach()), var)
    losses = 0.5 * (torch.log(least) + (input - target).square() / least)
    losses = losses + 0.5 * math.log(2 * math.pi) if full else losses
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


def tensor_of(data: Any, dtype: torch.dtype | None = None, **given: Any) -> Tensor:
    """`torch.tensor` of tensors without dims: their values, and no gradient."""
    return _stacked(data).to(dtype=dtype, **given)


def _stacked(data: Any) -> Tensor:
    if isinstance(data, list | tuple):
        parts = [_stacked(part) for part in data]
        kinds = [part.dtype for part in parts]
        common = reduce(torch.promote_types, kinds)
        return torch.stack([part.to(common) for part in parts])
    return data.detach() if isinstance(data, Tensor) else torch.tensor(data)


def _is_of_tensors(data: Any) -> bool:
    """Whether tensors without dims stand in lists, and no others."""
    if isinstance(data, list | tuple):
        return any(map(_is_of_tensors, data))
    return isinstance(data, Tensor) and data.dim() == 0


UNCHECKED: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {
        torch.cov: cov,
        torch.Tensor.cov: cov,
        torch.corrcoef: corrcoef,
        torch.Tensor.corrcoef: corrcoef,
        F.gaussian_nll_loss: gaussian_nll_loss,
    }
)


def unchecked(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    """What computes the same without a look at values; None where ``func`` looks at none, or is
    given what is not here."""
    if func is torch.tensor and args and isinstance(args[0], list | tuple):
        plain = {"dtype", "device"}.issuperset(kwargs or ())
        return tensor_of if plain and len(args) == 1 and _is_of_tensors(args[0]) else None
    own = UNCHECKED.get(func)
    if own is None:
        return None
    names = ("input", "target", "var", "full", "eps", "reduction")
    given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
    weights = any(given.get(name) is not None for name in ("fweights", "aweights"))
    x = given.get("self", given.get("input"))
    if weights or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if own is gaussian_nll_loss:
        return own if _is_gaussian(x, given) else None
    return own if len(args) < 2 else None


def _is_gaussian(x: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether there is a variance for each number, or one for each row, and a known reduction."""
    variance, shape = given.get("var"), tuple(x.shape)
    fits = isinstance(variance, Tensor) and tuple(variance.shape) in (
        shape, shape[:-1], (*shape[:-1], 1),
    )  # fmt: skip
    return fits and given.get("reduction", "mean") in ("none", "mean", "sum")
