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
