"""Ops that autograd's functions call, as smaller ones whose dims a rule can follow.

A trace below autograd has the inner form of a softmax, a norm or a product with a sum, for which
the forward of a model, traced above, needs no rule. The forms here say which entries meet which;
they are traced and never run on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.torch_private.ops import log_softmax, softmax


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    powers = torch.exp(x - torch.amax(x, dim, keepdim=True))
    return powers / powers.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    below = x - torch.amax(x, dim, keepdim=True)
    return below - below.exp().sum(dim, keepdim=True).log()


def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return x * beta + torch.mm(a, b) * alpha


def _layer_norm(x: Tensor, shape: list[int], weight: Any, bias: Any, eps: float) -> Any:
    """Result, mean and inverse deviation, over the last dims."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    inverse = torch.rsqrt((x - mean).square().mean(dims, keepdim=True) + eps)
    made = (x - mean) * inverse
    made = made if weight is None else made * weight
    return made if bias is None else made + bias, mean, inverse


def parts() -> Mapping[Any, Callable[..., Any]]:
    """What each op is made of, as `make_fx` takes it."""
    aten: Any = torch.ops.aten
    return {
        softmax: _softmax,
        log_softmax: _log_softmax,
        aten.addmm.default: _addmm,
        aten.native_layer_norm.default: _layer_norm,
    }
