"""What emitted JAX programs import: their tables, the loop over layers, collectives and ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autopar.runtime.jax_collectives import (
    all_reduce,
    all_to_all,
    copy_to,
    gather,
    keep_first,
    pad,
    reduce_scatter,
    shard,
    whole,
)
from autopar.runtime.jax_ops import (
    attention,
    conv,
    cross_entropy,
    embedding,
    layer_norm,
    linear,
    rms_norm,
)
from autopar.runtime.settings import Settings

Array = Any
FP32 = jnp.dtype("float32")
"""What emitted code means by float32; verification puts float64 here."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: global shape, stored dtype, the model axes on its dims.

    ``deferred``: axes on which every rank has all of it and a part of its gradient.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    deferred: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A block: the module paths of its layers, and one layer's parameters by name. The layers are
    stored stacked along a first dim."""

    layers: tuple[str, ...]
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Stack:
    """The parameters of all layers of a block as a program gets them.

    ``prepare`` makes one layer's parameters what the block computes with: cast, and gathered where
    ``dp_shard`` cuts them. ``regather``: the gathered ones are not kept for the backward pass.
    """

    arrays: Mapping[str, Array]
    prepare: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    regather: bool
    recompute: bool


def layers(block: Callable[..., Any], stack: Stack, *carry: Array, shared: Any = ()) -> Any:
    """``block(parameters, *shared, *carry)`` for each layer in turn, which gives the next carry."""
    run = _remembering(block, stack)

    def body(carry: Any, piece: Any) -> Any:
        given = run(piece, *shared, *carry)
        return given if isinstance(given, tuple) else (given,), None

    last, _ = lax.scan(body, carry, stack.arrays)
    return last if len(last) > 1 else last[0]


def layer(block: Callable[..., Any], stack: Stack, index: int, *inputs: Array) -> Any:
    """``block(parameters, *inputs)`` for the layer at ``index``."""
    return _remembering(block, stack)({n: a[index] for n, a in stack.arrays.items()}, *inputs)


def _remembering(block: Callable[..., Any], stack: Stack) -> Callable[..., Any]:
    """The block on stored parameters, keeping for backward what the plan says."""

    def run(piece: Any, *inputs: Array) -> Any:
        return block(stack.prepare(piece), *inputs)

    if stack.recompute:
        return jax.checkpoint(run, prevent_cse=False)
    if stack.regather:
        return jax.checkpoint(run, prevent_cse=False, policy=_all_but_gathered)
    return run


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """What to keep: everything that no gather over ``dp_shard`` made."""
    axes = params.get("axis_name", ())
    return not (primitive.name == "all_gather" and "dp_shard" in axes)


__all__ = [
    "FP32",
    "Block",
    "Parameter",
    "Settings",
    "Stack",
    "all_reduce",
    "all_to_all",
    "attention",
    "conv",
    "copy_to",
    "cross_entropy",
    "embedding",
    "gather",
    "keep_first",
    "layer",
    "layer_norm",
    "layers",
    "linear",
    "pad",
    "reduce_scatter",
    "rms_norm",
    "shard",
    "whole",
]
