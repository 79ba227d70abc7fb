"""Functions of torch that look at values before they compute, as what they compute.

A capture has no values. What a function checks (a variance below nothing, weights that are
negative) is the model's on one device; calls with arguments that are not here stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cov(x: Tensor, *, correction: int = 1) -> Tensor:
    """Variables [v, n], or one [n] -> [v, v], or a number."""
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    less = rows - rows.mean(1, keepdim=True)
    return (less @ less.t() / max(0, rows.shape[1] - correction)).squeeze()


def corrcoef(x: Tensor) -> Tensor:
    """`cov` over both standard deviations, between -1 and 1."""
    both = cov(x)
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
    if var.dim() + 1 == input.dim():
        var = var.unsqueeze(-1)
    least = torch.where(var < eps, eps + (var - var.detach()), var)
    losses = 0.5 * (torch.log(least) + (input - target).square() / least)
    losses = losses + 0.5 * math.log(2 * math.pi) if full else losses
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


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
    own = UNCHECKED.get(func)
    if own is None:
        return None
    given = {name for name, value in (kwargs or {}).items() if value is not None}
    plain = own is not gaussian_nll_loss or all(isinstance(a, Tensor) for a in args[:3])
    weighted = given & {"fweights", "aweights"} or (own is cov and len(args) > 1)
    return own if plain and not weighted else None
