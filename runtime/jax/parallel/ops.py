"""The ops of emitted JAX programs that are more than one jnp call, on the pieces of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.jax.parallel.collectives import Axes
from autopar.runtime.jax.parallel.tables import Array


def wide(x: Array) -> Array:
    """``x`` in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def linear(x: Array, weight: Array, preferred_element_type: Any = None) -> Array:
    """x [..., k], weight [n, k] -> [..., n], of that dtype where one is preferred."""
    return jnp.einsum("...k,nk->...n", x, weight, preferred_element_type=preferred_element_type)


def layer_norm(
    x: Array, weight: Array = None, bias: Array = None, dims: int = 1, eps: float = 1e-5
) -> Array:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last ``dims`` dims."""
    over = tuple(range(-dims, 0))
    y = wide(x)
    y = y - y.mean(over, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(over, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).astype(x.dtype)


def rms_norm(
    x: Array, weight: Array = None, eps: float = 1e-6, upcast: bool = False, scale_offset: int = 0
) -> Array:
    """``x / sqrt(mean(x^2) + eps) * (scale_offset + weight)`` over the last dim."""
    y = wide(x) if upcast else x
    y = (y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)).astype(x.dtype)
    return y if weight is None else y * (weight + scale_offset)


def embedding(ids: Array, weight: Array, axis: Axes | None = None) -> Array:
    """Rows of ``weight``. With ``axis`` each rank holds a piece of the rows: a partial sum, zero
    where another rank has the row. Negative ids count from the end, as in jnp."""
    if axis is None:
        return weight[ids]
    rows = weight.shape[0]
    ids = jnp.where(ids < 0, ids + rows * lax.axis_size(axis), ids)
    place = ids - lax.axis_index(axis) * rows
    mine = (place >= 0) & (place < rows)
    taken = weight[jnp.where(mine, place, 0)]
    return jnp.where(mine[..., None], taken, jnp.zeros_like(taken))


def cross_entropy(
    logits: Array,
    labels: Array,
    count: float = 1,
    axis: Axes | None = None,
    zero_outside: bool = False,
) -> Array:
    """The sum of the cross-entropies of this rank's rows over ``count``, the rows of the batch.

    logits [t, v] (with ``axis`` this rank's piece of v), labels [t] -> scalar. The shares of all
    ranks that split t add up to the mean. Computed in at least float32; the logits are all that
    backward reads, and one array like them all that it makes. Negative labels count from the end,
    as in jnp; with ``zero_outside`` a label that is no class makes 0, as its one-hot row of zeros.
    """
    return (
        _entropy(axis, logits, *label_places(labels, logits.shape[-1], axis, zero_outside)) / count
    )


def label_places(
    labels: Array, columns: int, axis: Axes | None, zero_outside: bool
) -> tuple[Array, Array | None]:
    """The column of each label among this rank's, and which rows count (None: all)."""
    first: Any = 0 if axis is None else lax.axis_index(axis) * columns
    classes = columns * (1 if axis is None else lax.axis_size(axis))
    if zero_outside:
        return labels - first, (labels >= 0) & (labels < classes)
    return jnp.where(labels < 0, labels + classes, labels) - first, None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _entropy(axis: Axes | None, logits: Array, place: Array, counts: Array | None) -> Array:
    return entropy_forward(axis, logits, place, counts)[0]


def entropy_forward(
    axis: Axes | None, logits: Array, place: Array, counts: Array | None
) -> tuple[Array, Any]:
    """The sum over rows that count of log(sum(exp(logits))) less the logit at ``place``, where this
    rank has it; kept: logits, places, the logarithms, which rows count."""
    columns = logits.shape[-1]
    largest = wide(logits.max(-1))
    if axis is not None:
        largest = lax.pmax(largest, axis)
    mine = (place >= 0) & (place < columns)
    picked = jnp.take_along_axis(logits, jnp.where(mine, place, 0)[:, None], axis=-1)[:, 0]
    parts = jnp.stack(
        [
            jnp.exp(wide(logits) - largest[:, None]).sum(-1),
            jnp.where(mine, wide(picked) - largest, 0.0),
        ]
    )
    total, label = parts if axis is None else lax.psum(parts, axis)
    rows = jnp.log(total) - label
    rows = rows if counts is None else jnp.where(counts, rows, 0.0)
    return rows.sum(), (logits, place, jnp.log(total) + largest, counts)


def entropy_gradient(kept: Any) -> Array:
    """Of the sum, for the logits, in at least float32; ``kept``: of `entropy_forward`."""
    logits, place, logarithm, counts = kept
    hit = place[:, None] == jnp.arange(logits.shape[-1])
    gradient = jnp.exp(wide(logits) - logarithm[:, None]) - hit
    return gradient if counts is None else jnp.where(counts[:, None], gradient, 0.0)


def _entropy_backward(axis: Axes | None, kept: Any, g: Array) -> tuple[Array, None, None]:
    logits, gradient = kept[0], entropy_gradient(kept) * g
    # else XLA makes it once for each product that reads it
    return lax.optimization_barrier(gradient.astype(logits.dtype)), None, None


_entropy.defvjp(entropy_forward, _entropy_backward)


def conv(
    x: Array,
    weight: Array,
    stride: Sequence[int] = (),
    padding: Sequence[tuple[int, int]] = (),
    dilation: Sequence[int] = (),
    groups: int = 1,
    preferred_element_type: Any = None,
) -> Array:
    """x [b, c, *s], weight [o, c/groups, *k] -> [b, o, *s]; what is not given moves nothing."""
    spatial = x.ndim - 2
    return lax.conv_general_dilated(
        x,
        weight,
        stride or (1,) * spatial,
        padding or ((0, 0),) * spatial,
        rhs_dilation=dilation or (1,) * spatial,
        feature_group_count=groups,
        preferred_element_type=preferred_element_type,
    )


def clamp(x: Array, least: float, most: float) -> Array:
    """``x`` between two numbers, with the gradient of `lax.clamp`: none at the bounds."""
    return lax.clamp(jnp.asarray(least, x.dtype), x, jnp.asarray(most, x.dtype))
