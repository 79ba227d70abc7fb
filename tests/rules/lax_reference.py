"""What the primitives of `lax_cases` compute, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _runs(function: Callable[[Tensor, int], Tensor]) -> Callable[[Any], Tensor]:
    def run(call: Any) -> Tensor:
        dim = call.attrs["axis"]
        if not call.attrs["reverse"]:
            return function(call.x, dim)
        return function(call.x.flip(dim), dim).flip(dim)

    return run


def _sorted(call: Any) -> tuple[Tensor, ...]:
    dim = call.attrs["dimension"]
    places = call.x.argsort(dim=dim, stable=True)
    return tuple(operand.gather(dim, places) for operand in call.operands)


def _windows(start: float, joins: Callable[[Tensor, int], Tensor]) -> Callable[[Any], Tensor]:
    def run(call: Any) -> Tensor:
        x, attrs = call.x, call.attrs
        pairs = [n for pair in reversed(attrs["padding"]) for n in pair]
        x = torch.nn.functional.pad(x, pairs, value=start)
        each = zip(attrs["window_dimensions"], attrs["window_strides"], strict=True)
        for dim, (size, stride) in enumerate(each):
            x = joins(x.unfold(dim, size, stride), -1)
        return x

    return run


def _chosen(call: Any) -> Tensor:
    which, *cases = call.operands
    return torch.stack(cases).gather(0, which[None])[0]


LAX_REFERENCE: Mapping[str, Callable[[Any], Any]] = {
    "jax::cumsum": _runs(torch.cumsum),
    "jax::cumprod": _runs(torch.cumprod),
    "jax::cummax": _runs(lambda x, dim: x.cummax(dim).values),
    "jax::cummin": _runs(lambda x, dim: x.cummin(dim).values),
    "jax::cumlogsumexp": _runs(torch.logcumsumexp),
    "jax::argmin": lambda c: c.x.argmin(c.attrs["axis"]),
    "jax::sort": _sorted,
    "jax::reduce_window_max": _windows(-torch.inf, lambda x, d: x.amax(d)),
    "jax::reduce_window_min": _windows(torch.inf, lambda x, d: x.amin(d)),
    "jax::reduce_window_sum": _windows(0.0, lambda x, d: x.sum(d)),
    "jax::cholesky": lambda c: torch.linalg.cholesky(c.x),
    "jax::select_n": _chosen,
}
