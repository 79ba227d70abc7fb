"""What emitted JAX programs import: their tables, the loop over layers, collectives and ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autopar.runtime.jax_attention import attention
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
    clamp,
    conv,
    cross_entropy,
    embedding,
    layer_norm,
    linear,
    rms_norm,
)
from autopar.runtime.settings import Settings

Array = Any
FP32, BF16, FP16 = map(jnp.dtype, ("float32", "bfloat16", "float16"))
"""What emitted code means by these; verification puts float64 in their place."""
remembers = True
"""Whether backward runs anything again; where every result is watched, it does not."""

WHOLE = PartitionSpec()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: global shape, the model axes on its dims, stored dtype.

    ``spec``:     may be shorter than the shape; the dims that it leaves out are whole.
    ``deferred``: axes on which every rank has all of it and a part of its gradient.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec = WHOLE
    dtype: str = "float32"
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
    ``recompute``: ``none``, ``full``, or ``compute``, which keeps what collectives gave.
    """

    arrays: Mapping[str, Array]
    prepare: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    regather: bool
    recompute: str


def layers(
    block: Callable[..., Any],
    stack: Stack,
    *carry: Array,
    shared: Sequence[Array] = (),
    between: Callable[..., Any] | None = None,
) -> Any:
    """``block(parameters, *shared, *carry)`` for each layer in turn, which gives the next carry;
    ``between`` takes it from one layer to the next."""
    head = stack.arrays if between is None else {n: a[:-1] for n, a in stack.arrays.items()}
    # XLA inlines a loop that runs once
    loops = any(a.shape[0] > 1 for a in head.values())
    run = _remembering(block, stack, in_loop=loops)

    def body(carry: Any, piece: Any) -> Any:
        given = run(piece, *shared, *carry)
        if between is not None:
            given = between(*given) if isinstance(given, tuple) else between(given)
        return given if isinstance(given, tuple) else (given,), None

    last, _ = lax.scan(body, carry, head)
    if between is not None:
        return layer(block, stack, -1, *shared, *last)
    return last if len(last) > 1 else last[0]


def layer(block: Callable[..., Any], stack: Stack, index: int, *inputs: Array) -> Any:
    """``block(parameters, *inputs)`` for the layer at ``index``."""
    piece = {name: a[index] for name, a in stack.arrays.items()}
    return _remembering(block, stack, in_loop=False)(piece, *inputs)


def _remembering(block: Callable[..., Any], stack: Stack, in_loop: bool) -> Callable[..., Any]:
    """The block on stored parameters, keeping for backward what the plan says.

    Outside of a loop XLA sees forward and backward at once, and must be told not to keep after all.
    """

    def run(piece: Any, *inputs: Array) -> Any:
        return block(stack.prepare(piece), *inputs)

    checkpoint = partial(jax.checkpoint, prevent_cse=not in_loop)
    found: Callable[..., Any] = run
    if not remembers:
        return found
    if stack.recompute == "full":
        found = checkpoint(run)
    elif stack.recompute == "compute":
        found = checkpoint(run, policy=_only_moved)
    elif stack.regather:
        found = checkpoint(run, policy=_all_but_gathered)
    return found


def derivative(
    backward: Callable[..., Any], of: Sequence[int] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Makes ``backward(*operands, *gradients)`` the derivative of a function: it gives the
    gradients of the operands at the positions ``of``, None: of all."""

    def with_it(forward: Callable[..., Any]) -> Any:
        function = jax.custom_vjp(forward)

        def pull(operands: tuple[Array, ...], given: Any) -> tuple[Any, ...]:
            made = backward(*operands, *(given if isinstance(given, tuple) else (given,)))
            made = made if isinstance(made, tuple) else (made,)
            places = range(len(operands)) if of is None else of
            found = dict(zip(places, made, strict=True))
            return tuple(
                found[i].astype(x.dtype) if i in found else None for i, x in enumerate(operands)
            )

        function.defvjp(lambda *operands: (forward(*operands), operands), pull)
        return function

    return with_it


COLLECTIVES = frozenset(("psum", "pmax", "all_gather", "reduce_scatter", "all_to_all"))
VIEWS = frozenset(("slice", "reshape", "transpose", "squeeze", "broadcast_in_dim"))


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """What to keep: everything but what a gather over ``dp_shard`` made, and views, also of
    what it made."""
    return not _gathers(primitive, params) and primitive.name not in VIEWS


def _only_moved(primitive: Any, *_: Any, **params: Any) -> bool:
    """What to keep: the results of collectives, gathered parameters apart."""
    return primitive.name in COLLECTIVES and not _gathers(primitive, params)


def _gathers(primitive: Any, params: Any) -> bool:
    return primitive.name == "all_gather" and "dp_shard" in params["axis_name"]


__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "Block",
    "Parameter",
    "Settings",
    "Stack",
    "all_reduce",
    "all_to_all",
    "attention",
    "clamp",
    "conv",
    "copy_to",
    "cross_entropy",
    "derivative",
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
