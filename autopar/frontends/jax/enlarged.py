"""Tensors made larger: padded, or repeated along a dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.frontends.jax.draft import Builder, Operand, Shape, Uniform, Value
from autopar.frontends.jax.lookups import kept

Outs = Sequence[tuple[Shape, str]]


def padded(
    params: Any, inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand] | None:
    """Places between entries are added behind each on a dim of its own; what is less than nothing
    at an end is cut off."""
    value, config = inputs[1], [tuple(map(int, each)) for each in params["padding_config"]]
    if not isinstance(value, Uniform):
        return None

    def with_ends(x: Value, pairs: Sequence[tuple[int, int]]) -> Value:
        if not any(map(any, pairs)):
            return x
        shape = tuple(a + n + b for n, (a, b) in zip(x.shape, pairs, strict=True))
        made = builder.op("pad", (x,), shape, x.dtype, low_high=tuple(pairs), value=value.value)
        return builder.tensor(made)

    x = builder.tensor(inputs[0])
    for dim, (_, _, within) in enumerate(config):
        if within and x.shape[dim]:
            before, size, behind = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
            apart = builder.tensor(builder.reshape(x, (*before, size, 1, *behind)))
            apart = with_ends(
                apart, [(0, within if d == dim + 1 else 0) for d in range(len(apart.shape))]
            )
            x = builder.tensor(builder.reshape(apart, (*before, size * (within + 1), *behind)))
            x = kept(x, dim, 0, size * (within + 1) - within, builder)
    for dim, (low, high, _) in enumerate(config):
        x = kept(x, dim, max(0, -low), x.shape[dim] - max(0, -high), builder)
    return [with_ends(x, [(max(0, low), max(0, high)) for low, high, _ in config])]


def tiled(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    """What a dim of one entry is repeated to is that dim, so that a batch is made as it is by
    broadcasting; any other one is repeated on a dim of its own before it."""
    times = [int(n) for n in params["reps"]]
    apart: list[int] = []
    spread: list[int] = []
    for size, n in zip(inputs[0].shape, times, strict=True):
        apart += [size] if size == 1 or n == 1 else [1, size]
        spread += [size * n] if size == 1 or n == 1 else [n, size]
    x = builder.expand(builder.reshape(inputs[0], tuple(apart)), tuple(spread))
    return [builder.reshape(x, outs[0][0])]
