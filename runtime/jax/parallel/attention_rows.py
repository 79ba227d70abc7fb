"""Attention whose scores are never all there at once, forward or backward.

The products and softmax written out keep [b, h, s, t] scores for the backward pass. Here a kernel
of the device does not make them, or a loop takes a block of rows (queries) at a time against all
keys: a row's softmax is whole in it, and backward makes a block's scores again from q and k, which
are all that is kept (Rabe and Staats 2021, "Self-attention does not need O(n^2) memory", with the
keys whole).

Where the device has a kernel (`attention_kernels`) and neither a mask nor a piece of the queries is
given, that runs; all else the loop does, on every device. Of a window a block of rows takes the
keys that any of them sees; not beside a mask, for a row that it hides whole sees all keys alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autopar.runtime.jax.parallel.attention_kernels import kernel_for
from autopar.runtime.jax.parallel.collectives import Axes
from autopar.runtime.jax.parallel.tables import Array
from autopar.runtime.jax.parallel.zigzag import places_in_whole

LEAST_ROWS = 64
"""Of a block, so that its products are not thin."""


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array = None,
    causal: bool = False,
    scale: Any = None,
    rows: Axes = (),
    order: str = "",
    window: int | None = None,
) -> Array:
    """softmax(scale * q k^T + mask) v: q [b, h, s, d], k and v [b, g, t, d], h a multiple of g.

    The softmax is computed in at least float32; ``scale`` None is ``1 / sqrt(d)``. A boolean mask
    says which scores count, another one is added; a row that has none gets the mean of v. Of a
    causal mask with a ``window`` a row sees so many columns, itself the last. Of ranks along
    ``rows`` each has a piece of the queries, one behind the other or in zigzag ``order``: a causal
    mask shows them the keys up to their own places in the whole sequence.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = kernel_for(q, k) if mask is None and not rows else None
    if kernel is not None:
        made: Array = kernel(q, k, v, causal, scale, window)
        return made
    # a loop's results have no other mark that a layer could keep them by
    here = partial(
        _rows, causal=causal, scale=scale, axes=rows, order=order, count=q.shape[2], window=window
    )
    return checkpoint_name(_by_rows(here, q, k, v, mask), "attention")


def rows_of_block(s: int, t: int, d: int, window: int | None = None) -> int:
    """How many of ``s`` rows are one block: as many as have no more scores than q has numbers; of a
    window no more than it is wide, which see less than two of it."""
    if window is not None:
        widest = max(LEAST_ROWS, window)
        return min(s, widest, max(LEAST_ROWS, s * d // (2 * widest)))
    return min(s, max(LEAST_ROWS, s * d // t))


def _rows(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    first: Array,
    causal: bool,
    scale: Any,
    axes: Axes,
    order: str,
    count: int,
    window: int | None,
) -> Array:
    """A block of the ``count`` rows here, the first of which is row number ``first`` of these, as
    products and a softmax."""
    b, h, s, d = q.shape
    places, start = first + jnp.arange(s), 0
    if causal and axes:
        rank, ways = lax.axis_index(axes), lax.axis_size(axes)
        places = places_in_whole(places, count, rank, ways, order)
    if window is not None and mask is None and order != "zigzag":
        width = min(k.shape[2], s + window - 1)
        start = jnp.clip(places[0] - (window - 1), 0, k.shape[2] - width)
        k, v = (lax.dynamic_slice_in_dim(x, start, width, 2) for x in (k, v))
    g, t = k.shape[1:3]
    q = q.reshape(b, g, h // g, s, d)
    scores = jnp.einsum("bgrsd,bgtd->bgrst", q, k)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) * scale
    least = jnp.finfo(scores.dtype).min
    if causal:
        scores = jnp.where(seen(places, start + jnp.arange(t), window), scores, least)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (b, h, s, t)).reshape(scores.shape)
        scores = jnp.where(mask, scores, least) if mask.dtype == jnp.bool_ else scores + mask
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgrst,bgtd->bgrsd", weights, v).reshape(b, h, s, d)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_rows(rows: partial[Array], q: Array, k: Array, v: Array, mask: Array) -> Array:
    """``rows(q, k, v, mask, first)`` a block at a time."""

    def block(first: Any, size: int, out: Array) -> Array:
        made = rows(rows_cut(q, first, size), k, v, rows_cut(mask, first, size), first)
        return lax.dynamic_update_slice_in_dim(out, made, first, 2)

    window = rows.keywords["window"] if mask is None else None
    return over_blocks(q, k, block, jnp.zeros(q.shape, v.dtype), window)


def _forward(rows: partial[Array], q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Any]:
    return _by_rows(rows, q, k, v, mask), (q, k, v, mask)


def _backward(rows: partial[Array], kept: Any, g: Array) -> tuple[Array, ...]:
    q, k, v, mask = kept
    biased = mask is not None and mask.dtype != jnp.bool_

    def block(first: Any, size: int, so_far: Any) -> Any:
        here = rows_cut(mask, first, size)
        given = (rows_cut(q, first, size), k, v, *((here,) if biased else ()))
        _, pull = jax.vjp(
            lambda q, k, v, *bias: rows(q, k, v, bias[0] if biased else here, first), *given
        )
        dq, dk, dv, *bias = pull(rows_cut(g, first, size))
        updated = [
            lax.dynamic_update_slice_in_dim(so_far[0], dq, first, 2),
            so_far[1] + dk,
            so_far[2] + dv,
        ]
        if biased:
            updated.append(_put_or_add(so_far[3], bias[0], first))
        return tuple(updated)

    zeros = [jnp.zeros_like(q)] + [
        jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
        for x in (k, v, *((mask,) if biased else ()))
    ]
    window = rows.keywords["window"] if mask is None else None
    dq, dk, dv, *bias = over_blocks(q, k, block, tuple(zeros), window)
    last = bias[0].astype(mask.dtype) if biased else None
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), last


_by_rows.defvjp(_forward, _backward)


def over_blocks(
    q: Array, k: Array, block: Callable[..., Any], start: Any, window: int | None = None
) -> Any:
    """``block(first row, rows, so far)`` for every block of the rows of q, the last one shorter."""
    s, d = q.shape[2:]
    size = rows_of_block(s, k.shape[2], d, window)
    rest = s % size

    # no `fori_loop`, which would be a scan: jax takes what hangs on the counter alone, as causal
    # masks do, out of scans, and keeps it for all blocks at once
    def following(state: tuple[Array, Any]) -> tuple[Array, Any]:
        first, so_far = state
        return first + size, block(first, size, so_far)

    _, full_blocks = lax.while_loop(
        lambda state: state[0] < s - rest, following, (jnp.int32(0), start)
    )
    return block(s - rest, rest, full_blocks) if rest else full_blocks


def rows_cut(x: Array, first: Any, size: int) -> Array:
    """Rows of q or of what lies beside it; a mask for all rows alike stays."""
    if x is None or x.shape[2] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, first, size, 2)


def seen(rows: Array, columns: Array, window: int | None) -> Array:
    """Which of ``columns`` causal rows see, by their places: [rows, columns]."""
    back = rows[:, None] - columns
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def _put_or_add(total: Array, piece: Array, first: Any) -> Array:
    """The gradient of a mask: of its own rows, or of one row that all share."""
    if total.shape[2] == 1:
        return total + piece
    return lax.dynamic_update_slice_in_dim(total, piece.astype(total.dtype), first, 2)
