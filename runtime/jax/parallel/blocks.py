"""A block of ``model.py``, run for each of its layers: what backward keeps of it, and what it is
given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from autopar.runtime.jax.parallel.tables import MOVED, SHARING, Array

remembers = True
"""Whether backward runs anything again; where every result is watched, it does not."""


@dataclass(frozen=True)
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
    if all(a.shape[0] == 1 for a in jax.tree.leaves((stack.arrays, tuple(each)))):
        given = layer(block, stack, 0, *shared, *(rows[0] for rows in each), *carry)
        return _next(given, between)
    run = _remembering(block, stack)

    def body(carry: Any, row: Any) -> Any:
        piece, own = row
        given = _next(run(piece, *shared, *own, *carry), between)
        return given if isinstance(given, tuple) else (given,), None

    last, _ = lax.scan(body, carry, (stack.arrays, tuple(each)))
    return last if len(last) > 1 else last[0]


def _next(given: Any, between: Callable[..., Any] | None) -> Any:
    if between is None:
        return given
    return between(*given) if isinstance(given, tuple) else between(given)


def layer(block: Callable[..., Any], stack: Stack, index: int, *inputs: Array) -> Any:
    """``block(parameters, *inputs)`` for the layer at ``index``."""
    return _remembering(block, stack, index)(stack.arrays, *inputs)


def _remembering(
    block: Callable[..., Any], stack: Stack, index: int | None = None
) -> Callable[..., Any]:
    """The block on stored parameters, those of one layer or, at an ``index``, of all, keeping for
    backward what the plan says.

    In a loop, ``index`` None, XLA sees forward and backward apart. Elsewhere it must be told not to
    keep after all; and a layer is cut off its stack inside, so that the cut is not kept either.
    """

    def run(arrays: Any, *inputs: Array) -> Any:
        piece = arrays if index is None else jax.tree.map(lambda a: a[index], arrays)
        return block(stack.prepare(piece), *inputs)

    if not remembers:
        return run
    policy = {"none": _costly, "compute": _only_moved, "full": None}[stack.recompute]
    alone = index is not None
    checkpointed: Callable[..., Any] = jax.checkpoint(run, prevent_cse=alone, policy=policy)
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


_MOVED = frozenset(("psum", "pmax", "all_gather", "reduce_scatter", "all_to_all"))
_COSTLY = frozenset((
    "dot_general", "ragged_dot", "conv_general_dilated", "name",
    "dot_product_attention_fwd_wrapper", "gather", "reduce_window_max", "sort", "top_k", "cumsum",
    "cumlogsumexp", "cummax", "cummin", "cumprod", "argmax", "argmin",
))  # fmt: skip


def _costly(primitive: Any, *_: Any, **params: Any) -> bool:
    """What to keep: results of products, lookups, attention, and of collectives. All else is made
    again from them where backward reads it, in the kernel that does."""
    return primitive.name in _COSTLY or _only_moved(primitive, **params)


def _only_moved(primitive: Any, *_: Any, **params: Any) -> bool:
    """What to keep: the results of collectives, gathered parameters apart."""
    if primitive.name == "name":
        return bool(params["name"] == MOVED)
    return primitive.name in _MOVED and not _gathers(primitive, params)


def _gathers(primitive: Any, params: Any) -> bool:
    over = params.get("axis_name", ())
    return primitive.name == "all_gather" and any(axis in SHARING for axis in over)
