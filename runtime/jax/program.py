"""What emitted JAX programs import: their tables, the loop over layers, collectives and ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autopar.nouns import costly
from autopar.nouns.axes import SHARD
from autopar.runtime.jax.attention import attention
from autopar.runtime.jax.collectives import (
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
from autopar.runtime.jax.ops import (
    clamp,
    conv,
    cross_entropy,
    embedding,
    layer_norm,
    linear,
    rms_norm,
)
from autopar.runtime.shared.settings import Settings

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
    ``frozen``:   an array that the loss closes over: no gradient, no optimizer state.
    ``buffer``:   one that ``dp_shard`` does not cut, in its own dtype.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec = WHOLE
    dtype: str = "float32"
    deferred: tuple[str, ...] = ()
    frozen: bool = False
    buffer: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A block: the module paths of its layers, and one layer's parameters by name. The layers are
    stored stacked along a first dim."""

    layers: tuple[str, ...]
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Stack:
    """The parameters of all layers of a block as a program gets them: ``arrays`` by name, each with
    the layers as its first dim, or several of the kind.

    ``prepare`` makes one layer's parameters what the block computes with: cast, and gathered where
    ``dp_shard`` cuts them. The backward pass makes them again. ``recompute``: ``none``, which keeps
    the results of products and the like; ``full``; ``compute``, which keeps what collectives gave.
    """

    arrays: Mapping[str, Any]
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Array]]
    recompute: str


def layers(
    block: Callable[..., Any],
    stack: Stack,
    *carry: Array,
    shared: Sequence[Array] = (),
    each: Sequence[Array] = (),
    between: Callable[..., Any] | None = None,
) -> Any:
    """``block(parameters, *shared, *own, *carry)`` for each layer in turn, which gives the next
    carry; ``own`` are its rows of ``each``. ``between`` takes the carry to the layer after, of
    which the last one is apart."""
    # XLA inlines a loop that runs once
    loops = any(a.shape[0] > 1 for a in jax.tree.leaves(stack.arrays))
    run = _remembering(block, stack, in_loop=loops)

    def body(carry: Any, row: Any) -> Any:
        piece, own = row
        given = run(piece, *shared, *own, *carry)
        if between is not None:
            given = between(*given) if isinstance(given, tuple) else between(given)
        return given if isinstance(given, tuple) else (given,), None

    last, _ = lax.scan(body, carry, (stack.arrays, tuple(each)))
    return last if len(last) > 1 else last[0]


def layer(block: Callable[..., Any], stack: Stack, index: int, *inputs: Array) -> Any:
    """``block(parameters, *inputs)`` for the layer at ``index``."""
    piece = jax.tree.map(lambda a: a[index], stack.arrays)
    return _remembering(block, stack, in_loop=False)(piece, *inputs)


def _remembering(block: Callable[..., Any], stack: Stack, in_loop: bool) -> Callable[..., Any]:
    """The block on stored parameters, keeping for backward what the plan says.

    Outside of a loop XLA sees forward and backward at once, and must be told not to keep after all.
    """

    def run(piece: Any, *inputs: Array) -> Any:
        return block(stack.prepare(piece), *inputs)

    if not remembers:
        return run
    policy = {"none": _costly, "compute": _only_moved, "full": None}[stack.recompute]
    checkpointed: Callable[..., Any] = jax.checkpoint(run, prevent_cse=not in_loop, policy=policy)
    return checkpointed


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
            gradients = dict(zip(places, made, strict=True))
            return tuple(
                gradients[i].astype(x.dtype) if i in gradients else None
                for i, x in enumerate(operands)
            )

        function.defvjp(lambda *operands: (forward(*operands), operands), pull)
        return function

    return with_it


_COSTLY = frozenset(name for row in costly.TABLE for name in row.primitives)


def _costly(primitive: Any, *_: Any, **params: Any) -> bool:
    """What to keep: results of products, lookups, attention, and of collectives. All else is made
    again from them where backward reads it, in the kernel that does."""
    return primitive.name in _COSTLY or _only_moved(primitive, **params)


def _only_moved(primitive: Any, *_: Any, **params: Any) -> bool:
    """What to keep: the results of collectives, gathered parameters apart."""
    return primitive.name in costly.COLLECTIVES.primitives and not _gathers(primitive, params)


def _gathers(primitive: Any, params: Any) -> bool:
    return primitive.name == "all_gather" and SHARD in params["axis_name"]


__all__ = [
    "BF16", "FP16", "FP32", "Block", "Parameter", "Settings", "Stack", "all_reduce", "all_to_all",
    "attention", "clamp", "conv", "copy_to", "cross_entropy", "derivative", "embedding", "gather",
    "keep_first", "layer", "layer_norm", "layers", "linear", "pad", "reduce_scatter", "rms_norm",
    "shard", "whole",
]  # fmt: skip
