"""The last product of a model and its cross-entropy, in chunks of rows: logits of one chunk at a
time are there. Gradients are made with them, as `autopar.runtime.pytorch.loss_head` has it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.jax.parallel.collectives import Axes
from autopar.runtime.jax.parallel.ops import entropy_forward, entropy_gradient, label_places, wide
from autopar.runtime.jax.parallel.tables import Array


class Head(NamedTuple):
    """What does not change from row to row: logits are cap x tanh(scale x z / cap) of the product
    z and its bias."""

    chunks: int
    scale: float
    cap: float | None
    axis: Axes | None
    wide: bool


def linear_cross_entropy(
    x: Array,
    labels: Array,
    weight: Array,
    bias: Array = None,
    count: float = 1,
    chunks: int = 1,
    scale: float = 1.0,
    cap: float | None = None,
    axis: Axes | None = None,
    zero_outside: bool = False,
    wide: bool = False,
) -> Array:
    """The sum of the cross-entropies of this rank's rows over ``count``, the rows of the batch.

    x [t, k], labels [t], weight [v, k] and bias [v] (with ``axis`` this rank's pieces of v)
    -> scalar, in at least float32. ``chunks``: of so many as equal as they can be, one after the
    other. Labels are those of `cross_entropy`. ``wide``: products give logits in at least float32,
    and their gradients stay so.
    """
    place, counts = label_places(labels, weight.shape[0], axis, zero_outside)
    return _head(Head(chunks, scale, cap, axis, wide), x, weight, bias, place, counts) / count


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head(
    head: Head, x: Array, weight: Array, bias: Array, place: Array, counts: Array | None
) -> Array:
    def one(total: Array, rows: Any) -> tuple[Array, None]:
        return total + _losses(head, narrow, bias, *rows)[0], None

    narrow, total = weight.astype(x.dtype), jnp.zeros((), _wide_dtype(x))
    for rows in _in_chunks(head.chunks, (x, place, counts)):
        total, _ = lax.scan(one, total, rows)
    return total


def _head_forward(
    head: Head, x: Array, weight: Array, bias: Array, place: Array, counts: Array | None
) -> tuple[Array, Any]:
    """The sum of losses; kept: its gradients, those of weight and bias added up over chunks."""

    def one(sums: Any, given: Any) -> tuple[Any, Array]:
        total, of_weight, of_bias = sums
        loss, gradient = _losses(head, narrow, bias, *given)
        of_weight += wide(jnp.einsum("tv,tk->vk", gradient, given[0]))
        of_bias = None if of_bias is None else of_bias + wide(gradient).sum(0)
        return (total + loss, of_weight, of_bias), (gradient @ narrow).astype(x.dtype)

    narrow = weight.astype(x.dtype)
    zeros = [None if y is None else jnp.zeros(y.shape, _wide_dtype(x)) for y in (weight, bias)]
    sums: Any = (jnp.zeros((), _wide_dtype(x)), *zeros)
    of_x = []
    for rows in _in_chunks(head.chunks, (x, place, counts)):
        sums, made = lax.scan(one, sums, rows)
        of_x.append(made.reshape(-1, x.shape[-1]))
    total, of_weight, of_bias = sums
    of_bias = None if bias is None else of_bias.astype(bias.dtype)
    return total, (jnp.concatenate(of_x), of_weight.astype(weight.dtype), of_bias)


def _head_backward(head: Head, kept: Any, g: Array) -> tuple[Any, ...]:
    del head
    return (*(None if y is None else (y * g).astype(y.dtype) for y in kept), None, None)


_head.defvjp(_head_forward, _head_backward)


def _in_chunks(chunks: int, arrays: Any) -> list[Any]:
    """Arrays of rows as chunks of equal sizes; where they do not divide, the first ones have a row
    more and are a part of their own."""
    each, more = divmod(arrays[0].shape[0], chunks)
    parts, first = [], 0
    for number, size in ((more, each + 1), (chunks - more, each)):
        last = first + number * size
        if last > first:
            cut = partial(_cut, first, last, number)
            parts.append(jax.tree.map(cut, arrays))
        first = last
    return parts


def _cut(first: int, last: int, number: int, array: Array) -> Array:
    return array[first:last].reshape(number, -1, *array.shape[1:])


def _wide_dtype(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _losses(
    head: Head, weight: Array, bias: Array, x: Array, place: Array, counts: Array | None
) -> tuple[Array, Array]:
    """Of one chunk: the sum of losses of the rows that count, and its gradient for the product."""
    dtype = _wide_dtype(x) if head.wide else x.dtype
    z = jnp.einsum("tk,vk->tv", x, weight, preferred_element_type=dtype)
    z = z if bias is None else z + bias.astype(z.dtype)
    logits, slope = z, None
    if head.scale != 1.0:
        logits, slope = wide(z) * head.scale, head.scale
    if head.cap is not None:
        bent = jnp.tanh(wide(logits) / head.cap)
        logits, slope = head.cap * bent, (1 - jnp.square(bent)) * head.scale
    total, kept = entropy_forward(head.axis, logits, place, counts)
    gradient = entropy_gradient(kept)
    return total, (gradient if slope is None else gradient * slope).astype(dtype)
