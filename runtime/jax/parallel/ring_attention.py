"""Attention whose keys and values go around a ring of devices, each with a piece of the sequence.

Ring attention (Liu et al. 2023, arXiv:2310.01889): a device computes its queries against the piece
of keys and values that it holds, while it sends that piece on and the next one comes. In backward
keys and values go around again, and behind each piece the sum of its gradients, as far as home.
Over several axes they go all the way along the last for each step along the one before
(BurstAttention, arXiv:2403.09347; LoongTrain, arXiv:2406.18485).

A device's program does not know which piece it has, so what is hidden of a piece by its place is
left out by `lax.cond`: of n devices with pieces one behind the other all wait for the last, in
zigzag every step is half of a piece for each. Of a window, with pieces one behind the other, those
that nobody sees do not come around.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autopar.runtime.jax.parallel.attention_rows import over_blocks, rows_cut, seen
from autopar.runtime.jax.parallel.collectives import Axes
from autopar.runtime.jax.parallel.tables import MOVED, Array
from autopar.runtime.jax.parallel.zigzag import places_in_whole, to_zigzag

Pair = tuple[Array, Array]
Carry = tuple[Array, ...]
Run = Callable[..., Carry]
"""``run(rows, columns, hide, carry)``: what rows (first, stop) make of the first ``columns``."""


@dataclass(frozen=True)
class Ring:
    """The mesh axes around which keys and values go, outermost first, and what rows see."""

    axes: tuple[str, ...]
    order: str
    causal: bool
    scale: float
    window: int | None = None

    def rounds(self, rows: int) -> tuple[int, ...]:
        """How many pieces, of so many ``rows``, come along each axis: all, but for what lies
        further back than a window along the first."""
        ways = tuple(lax.axis_size(axis) for axis in self.axes)
        if self.window is None or self.order == "zigzag":
            return ways
        behind = -(-(self.window - 1) // (rows * math.prod(ways[1:])))
        return (min(ways[0], 1 + behind), *ways[1:])


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    ring: Axes,
    order: str = "",
    window: int | None = None,
) -> Array:
    """This device's rows of ``softmax(scale * q k^T + mask) v`` over whole sequences, of which the
    n devices along ``ring`` have equal pieces, one behind the other or in zigzag ``order``.

    q [b, h, s/n, d], k and v [b, g, t/n, d] -> [b, h, s/n, d]; ``mask`` [.., s/n or 1, t or 1] has
    the columns of all, in their own order, and no gradient. ``window``: of a causal mask a row sees
    so many columns, itself the last.

    Forward sends k and v n - 1 times by `lax.ppermute`, or as far as a window of pieces one behind
    the other reaches; backward sends them, and their gradients in at least float32, as often. Kept
    for backward: q, k, v, the result and the logarithm of the sums by which a row's weights are
    made of its scores again (under a mask the sums and the maxima).
    """
    axes = (ring,) if isinstance(ring, str) else tuple(ring)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        columns = k.shape[2] * lax.axis_size(axes)
        mask = jnp.broadcast_to(mask, (*mask.shape[:3], columns))
        mask = to_zigzag(mask, 3, lax.axis_size(axes)) if order == "zigzag" else mask
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    made: Array = _attended(Ring(axes, order, causal, scale, window), q, k, v, mask)
    return made


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(ring: Ring, q: Array, k: Array, v: Array, mask: Array) -> Array:
    return _attended_forward(ring, q, k, v, mask)[0]


def _attended_forward(ring: Ring, q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Any]:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    b, h, s, _ = q.shape
    state: Carry = (
        jnp.zeros((b, h, s, v.shape[3]), wide),
        jnp.full((b, h, s, 1), -jnp.inf, wide),
        jnp.zeros((b, h, s, 1), wide),
    )

    def visit(pair: Pair, back: tuple[int, ...]) -> None:
        nonlocal state
        run = partial(_add_softmax, ring.scale, q, *pair)
        state = _seen_of(ring, back, s, k.shape[2], mask, run, state)

    _around((k, v), ring.axes, ring.rounds(s), visit)
    sums, top, total = state
    # MOVED: to make them again keys and values would go around again
    out = checkpoint_name((sums / total).astype(v.dtype), MOVED)
    kept = (top + jnp.log(total),) if mask is None else (top, total)
    return out, (q, k, v, mask, out, tuple(checkpoint_name(x, MOVED) for x in kept))


def _attended_backward(ring: Ring, kept: Any, g: Array) -> tuple[Any, ...]:
    q, k, v, mask, out, normal = kept
    # else XLA keeps what came around in forward, since the same goes around here
    k, v, g = lax.optimization_barrier((k, v, g))
    wide = normal[0].dtype
    inner = (g.astype(wide) * out.astype(wide)).sum(-1, keepdims=True)
    dq = jnp.zeros(q.shape, wide)

    def visit(pair: Pair, back: tuple[int, ...]) -> Pair:
        nonlocal dq
        run = partial(_add_gradients, ring.scale, q, *pair, g, inner, normal)
        zeros = tuple(jnp.zeros(x.shape, wide) for x in pair)
        dq, dk, dv = _seen_of(ring, back, q.shape[2], k.shape[2], mask, run, (dq, *zeros))
        return dk, dv

    dk, dv = _there_and_back((k, v), ring.axes, ring.rounds(q.shape[2]), visit)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attended.defvjp(_attended_forward, _attended_backward)


# -- around ---------------------------------------------------------------------------------------


def _around(
    pair: Pair,
    axes: tuple[str, ...],
    rounds: tuple[int, ...],
    visit: Callable[..., None],
    back: tuple[int, ...] = (),
) -> None:
    """``visit(pair, back)`` of each piece, the own first; ``back``: of as many devices before this
    one along each axis."""
    if not axes:
        visit(pair, back)
        return
    for step in range(rounds[0]):
        coming = _sent_on(pair, axes[0]) if step + 1 < rounds[0] else pair
        _around(pair, axes[1:], rounds[1:], visit, (*back, step))
        pair = coming


def _there_and_back(
    pair: Pair,
    axes: tuple[str, ...],
    rounds: tuple[int, ...],
    visit: Callable[..., Pair],
    back: tuple[int, ...] = (),
) -> Pair:
    """`_around`, where ``visit`` gives this device's part of its piece's gradient: the sum of all
    devices' parts for the own piece. It begins on the device after its own and follows the piece,
    whose last step is home."""
    if not axes:
        return visit(pair, back)
    last = rounds[0] - 1
    own = behind = None
    for step in range(rounds[0]):
        coming = _sent_on(pair, axes[0]) if step < last else pair
        part = _there_and_back(pair, axes[1:], rounds[1:], visit, (*back, step))
        if step == 0:
            own = part
        else:
            part = part if behind is None else _added(part, behind)
            behind = _sent_on(part, axes[0], 1 if step < last else -last)
        pair = coming
    assert own is not None
    return own if behind is None else _added(own, behind)


def _added(one: Pair, other: Pair) -> Pair:
    return one[0] + other[0], one[1] + other[1]


def _sent_on(pair: Pair, axis: str, by: int = 1) -> Pair:
    """What the device ``by`` places before this one along ``axis`` has."""
    ways = lax.axis_size(axis)
    to_others = [(i, (i + by) % ways) for i in range(ways)]
    keys, values = (lax.ppermute(x, axis, to_others) for x in pair)
    return keys, values


def _piece(ring: Ring, back: tuple[int, ...]) -> Array:
    """The number of the piece that comes from ``back``."""
    piece: Any = 0
    for axis, behind in zip(ring.axes, back, strict=True):
        ways = lax.axis_size(axis)
        piece = piece * ways + (lax.axis_index(axis) - behind) % ways
    return piece


# -- of one piece ---------------------------------------------------------------------------------


def _seen_of(
    ring: Ring, back: tuple[int, ...], s: int, t: int, mask: Array, run: Run, carry: Carry
) -> Carry:
    """``run`` on what the ``s`` rows here see of the ``t`` columns that come from ``back``."""
    rank, ways = lax.axis_index(ring.axes), lax.axis_size(ring.axes)
    piece = _piece(ring, back)

    def by_place(rows: Array, first: Any) -> Any:
        places = places_in_whole(rows, s, rank, ways, ring.order)
        columns = places_in_whole(jnp.arange(t), t, piece, ways, ring.order)
        return seen(places, columns, ring.window), None

    def hide(rows: Array, first: Any) -> Any:
        """Of a mask: which scores count, and what is added to them."""
        here = lax.dynamic_slice_in_dim(mask, piece * t, t, 3)
        here = rows_cut(here, first, rows.size)
        counts, added = (here, None) if here.dtype == jnp.bool_ else (None, here)
        if ring.causal:
            before, _ = by_place(rows, first)
            counts = before if counts is None else counts & before
        return counts, added

    def triangle(rows: Array, first: Any) -> Any:
        return seen(rows, jnp.arange(t), None), None

    if mask is not None:  # a row that it hides whole sees all alike, those after it too
        return run((0, s), t, hide, carry)
    if not ring.causal:
        return run((0, s), t, None, carry)
    if ring.window is not None:
        if ring.order == "zigzag" or not any(back):
            return run((0, s), t, by_place, carry)
        before: Carry = lax.cond(
            piece < rank, lambda c: run((0, s), t, by_place, c), lambda c: c, carry
        )
        return before
    if not any(back):
        return run((0, s), t, triangle, carry)

    def earlier(carry: Carry) -> Carry:
        """All rows see a piece before them, in zigzag its early columns."""
        return run((0, s), t // 2 if ring.order == "zigzag" else t, None, carry)

    def later(carry: Carry) -> Carry:
        """None see one behind them; in zigzag the late rows do."""
        return run((s // 2, s), t, None, carry) if ring.order == "zigzag" else carry

    made: Carry = lax.cond(piece < rank, earlier, later, carry)
    return made


def _add_softmax(
    scale: float, q: Array, k: Array, v: Array, rows: tuple[int, int], columns: int, hide: Any,
    state: Carry,
) -> Carry:  # fmt: skip
    """Weighted sums of values, maxima of scores and sums of weights, with those of more columns."""
    k, v = k[:, :, :columns], v[:, :, :columns]

    def block(first: Any, size: int, state: Carry) -> Carry:
        first = rows[0] + first
        sums, top, total = (rows_cut(x, first, size) for x in state)
        scores, _ = _scores(scale, rows_cut(q, first, size), k, hide, first)
        largest = jnp.maximum(top, _flat(scores.max(-1, keepdims=True), q))
        base = jnp.where(largest == -jnp.inf, 0.0, largest)
        weights = jnp.exp(scores - _grouped(base, k))
        before = jnp.exp(top - base)
        more = jnp.einsum("bgrst,bgtd->bgrsd", weights.astype(v.dtype), v)
        made = (
            sums * before + _flat(more, q),
            largest,
            total * before + _flat(weights.sum(-1, keepdims=True), q),
        )
        return _put(state, made, first)

    made: Carry = over_blocks(q[:, :, slice(*rows)], k, block, state)
    return made


def _add_gradients(
    scale: float, q: Array, k: Array, v: Array, g: Array, inner: Array, normal: Carry,
    rows: tuple[int, int], columns: int, hide: Any, so_far: Carry,
) -> Carry:  # fmt: skip
    """Gradients of q, k and v with those of rows and columns; ``inner``: of a row's result and its
    gradient the product."""
    k, v = k[:, :, :columns], v[:, :, :columns]

    def block(first: Any, size: int, so_far: Carry) -> Carry:
        first = rows[0] + first
        dq, dk, dv = so_far
        here = rows_cut(q, first, size)
        scores, seen = _scores(scale, here, k, hide, first)
        top, *total = (_grouped(rows_cut(x, first, size), k) for x in normal)
        weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
        weights = weights / total[0] if total else weights
        grad = _grouped(rows_cut(g, first, size), k)
        dv = dv.at[:, :, :columns].add(
            jnp.einsum("bgrst,bgrsd->bgtd", weights.astype(v.dtype), grad).astype(dv.dtype)
        )
        of_weights = jnp.einsum("bgrsd,bgtd->bgrst", grad, v).astype(weights.dtype)
        of_scores = weights * (of_weights - _grouped(rows_cut(inner, first, size), k)) * scale
        if seen is not None:
            of_scores = jnp.where(seen, of_scores, 0.0)
        of_scores = of_scores.astype(q.dtype)
        dk = dk.at[:, :, :columns].add(
            jnp.einsum("bgrst,bgrsd->bgtd", of_scores, _grouped(here, k)).astype(dk.dtype)
        )
        more = _flat(jnp.einsum("bgrst,bgtd->bgrsd", of_scores, k), q).astype(dq.dtype)
        (dq,) = _put((dq,), (rows_cut(dq, first, size) + more,), first)
        return dq, dk, dv

    made: Carry = over_blocks(q[:, :, slice(*rows)], k, block, so_far)
    return made


def _scores(scale: float, q: Array, k: Array, hide: Any, first: Any) -> tuple[Array, Array]:
    """Of rows that begin with ``first``, [b, g, h / g, s, t], and which of them count."""
    b, h, s, _ = q.shape
    scores = jnp.einsum("bgrsd,bgtd->bgrst", _grouped(q, k), k)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) * scale
    if hide is None:
        return scores, None
    seen, added = (
        None if x is None else jnp.broadcast_to(x, (b, h, s, k.shape[2])).reshape(scores.shape)
        for x in hide(first + jnp.arange(s), first)
    )
    if seen is not None:
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    return scores if added is None else scores + added, seen


def _grouped(x: Array, k: Array) -> Array:
    """[b, h, s, d] -> [b, g, h / g, s, d], for the g heads of ``k``."""
    b, h, *rest = x.shape
    return x.reshape(b, k.shape[1], h // k.shape[1], *rest)


def _flat(x: Array, q: Array) -> Array:
    """The inverse of `_grouped`."""
    return x.reshape(*q.shape[:2], *x.shape[3:])


def _put(whole: Carry, rows: Carry, first: Any) -> Carry:
    pairs = zip(whole, rows, strict=True)
    return tuple(lax.dynamic_update_slice_in_dim(x, new, first, 2) for x, new in pairs)
