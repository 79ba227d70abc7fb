"""Cases of the primitives that programs of JAX call again with their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.rules.drawing import Draw

Made = tuple[tuple[Tensor, ...], dict[str, Any]]


def _running(d: Draw, kind: str) -> Made:
    del kind
    shape = d.shape()
    return (d.real(*shape),), {"axis": d.dim(shape), "reverse": d.flag()}


def _least(d: Draw, kind: str) -> Made:
    del kind
    shape = tuple(n + 1 for n in d.shape(2, 3))
    return (d.real(*shape, gradient=False),), {"axis": d.dim(shape)}


def _sort(d: Draw, kind: str) -> Made:
    del kind
    shape = d.shape()
    beside = (d.real(*shape),) if d.flag() else ()
    attrs = {"dimension": d.dim(shape), "is_stable": True, "num_keys": 1}
    return (d.real(*shape), *beside), attrs


def _window(d: Draw, kind: str) -> Made:
    del kind
    shape = d.shape(2, 3)
    each = [d.of((1, 1, (0, 0)), (1, 1, (0, 0)), (2, 1, (1, 0)), (2, 2, (0, 1))) for _ in shape]
    sizes, strides, padding = (tuple(column) for column in zip(*each, strict=True))
    attrs = {"window_dimensions": sizes, "window_strides": strides, "padding": padding}
    return (d.real(*shape),), attrs


def _positive(d: Draw, kind: str) -> Made:
    del kind
    n = d.small()
    x = d.real(*d.shape(0, 2), n, n, gradient=False)
    return ((x @ x.mT + torch.eye(n, dtype=x.dtype)).requires_grad_(),), {}


def _which(d: Draw, kind: str) -> Made:
    del kind
    shape = d.shape(1, 3)
    count = d.of(2, 3)
    return (d.ids(count, *shape), *(d.real(*shape) for _ in range(count))), {}


LAX_CASES: Mapping[str, Callable[[Draw, str], Made]] = {
    **dict.fromkeys(
        [f"jax::{n}" for n in "cumsum cumprod cummax cummin cumlogsumexp".split()], _running
    ),
    **dict.fromkeys([f"jax::reduce_window_{n}" for n in ("max", "min", "sum")], _window),
    "jax::argmin": _least,
    "jax::sort": _sort,
    "jax::cholesky": _positive,
    "jax::select_n": _which,
}
