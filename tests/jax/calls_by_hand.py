"""Calls of functions of JAX that want arguments of their own, each in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.signal
import jax.scipy.special
import jax.scipy.stats as stats
import numpy as np
import optax
from jax import lax, nn
from jax.numpy import linalg

B = 8
F, I, P = "float32", "int32", "bool"  # noqa: E741
Shape = tuple[tuple[int, ...], str]
Row = tuple[Callable[..., Any], Sequence[Shape]]

X, S, R = ((B, 4, 6), F), ((B, 4, 4), F), ((B, 6), F)
N, P3, IDS = ((B, 4, 6), I), ((B, 4, 6), P), ((B, 4), I)
NHWC, NCHW = ((B, 6, 6, 4), F), ((B, 4, 6, 6), F)
Q = ((B, 8, 4, 6), F)


def _conv(*, dims: Sequence[str] = ("NHWC", "HWIO", "NHWC"), **more: Any) -> Callable[..., Any]:
    options = {"window_strides": (1, 1), "padding": "SAME", **more}
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=dims, **options)


def _windows(start: float, joins: Any, **more: Any) -> Callable[..., Any]:
    options = {
        "window_dimensions": (1, 2, 2, 1),
        "window_strides": (1, 2, 2, 1),
        "padding": "SAME",
        **more,
    }
    return lambda x: lax.reduce_window(x, start, joins, **options)


def _held(*sizes: int) -> Shape:
    """A weight: no samples in front."""
    return (sizes, F)


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    mapped: Callable[..., Any] = jax.vmap(function)
    return mapped


def _at(name: str, value: Any = None, **options: Any) -> Callable[..., Any]:
    def function(x: Any, i: Any) -> Any:
        def one(x: Any, i: Any) -> Any:
            number = x[: i.shape[0]] * 0.5 + 1 if value is None else value
            return getattr(x.at[i], name)(number, **options)

        return jax.vmap(one)(x, i)

    return function


def _finite_segments(name: str, x: Any, i: Any) -> Any:
    made = getattr(jax.ops, f"segment_{name}")(x, i, num_segments=4)
    return jnp.nan_to_num(made, posinf=0, neginf=0)


def _scan(x: Any, w: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = jnp.maximum(h * 0.5, row @ w)
        return h, h.sum(-1)

    last, sums = lax.scan(step, jnp.zeros((x.shape[0], 8), x.dtype), jnp.moveaxis(x, 1, 0))
    return last, sums.T


EINSUMS: Mapping[str, Sequence[Shape]] = {
    "bsd,df->bsf": [X, _held(6, 8)],
    "bsd,btd->bst": [X, X],
    "bsd,bsd->bs": [X, X],
    "bsd->bd": [X],
    "bsd->dsb": [X],
    "bss->bs": [S],
    "bss->b": [S],
    "bsd,d->bs": [X, _held(6)],
    "bsd,bse,ef->bdf": [X, X, _held(6, 8)],
    "bsd,sd->b": [X, _held(4, 6)],
    "bsd,d->bsd": [X, _held(6)],
    "...d,fd->...f": [X, _held(8, 6)],
    "bsd,cd->": [X, X],
}
LOSSES: Mapping[str, Sequence[Shape]] = {
    "l2_loss": [X, X],
    "huber_loss": [X, X],
    "log_cosh": [X, X],
    "cosine_similarity": [X, X],
    "cosine_distance": [X, X],
    "hinge_loss": [X, X],
    "sigmoid_binary_cross_entropy": [X, X],
    "sigmoid_focal_loss": [X, X],
    "softmax_cross_entropy": [X, X],
    "safe_softmax_cross_entropy": [X, X],
    "softmax_cross_entropy_with_integer_labels": [X, IDS],
    "kl_divergence_with_log_targets": [X, X],
    "poly_loss_cross_entropy": [X, X],
    "squared_error": [X, X],
}
BY_HAND: Mapping[str, Row] = {
    # limits
    "jnp.clip(x, -1, 1)": (lambda x: jnp.clip(x, -1, 1), [X]),
    "jnp.clip(x, min=0)": (lambda x: jnp.clip(x, min=0), [X]),
    "jnp.clip(x, max=1)": (lambda x: jnp.clip(x, max=1.0), [X]),
    "jnp.clip of a weight's": (lambda x, v: jnp.clip(x, -v, v), [X, _held(6)]),
    "lax.clamp(-1, x, 1)": (lambda x: lax.clamp(-1.0, x, 1.0), [X]),
    "lax.clamp(low, x, high)": (lambda x, y: lax.clamp(jnp.minimum(y, 0), x, y * y), [X, X]),
    "lax.clamp of ints": (lambda n: lax.clamp(1, n, 2), [N]),
    "jnp.maximum(x, 0)": (lambda x: jnp.maximum(x, 0), [X]),
    "jnp.minimum(x, 1)": (lambda x: jnp.minimum(x, 1), [X]),
    "jnp.where(x > 0, x, 0)": (lambda x: jnp.where(x > 0, x, 0), [X]),
    "jnp.where(p, x, 1)": (lambda p, x: jnp.where(p, x, 1), [P3, X]),
    "jnp.where(p, x, v)": (lambda p, x, v: jnp.where(p, x, v), [P3, X, _held(6)]),
    "jnp.select": (lambda x, y: jnp.select([x > 0, y > 0], [x, y], x * y), [X, X]),
    "lax.select": (lambda p, x: lax.select(p, x, -x), [P3, X]),
    "jnp.piecewise": (lambda x: jnp.piecewise(x, [x < 0, x >= 1], [jnp.sin, 2.0, jnp.cos]), [X]),
    "jnp.heaviside": (lambda x: jnp.heaviside(x, 0.5) * x, [X]),
    "jnp.nan_to_num": (lambda x: jnp.nan_to_num(jnp.where(x > 1, jnp.inf, x), posinf=3.0), [X]),
    "x % 2": (lambda x: x % 2.0, [X]),
    "x // 2": (lambda x: (x // 2) * x, [X]),
    "n % 3": (lambda n: (n - 2) % 3, [N]),
    "n // 3": (lambda n: (n - 2) // 3, [N]),
    "lax.rem of ints": (lambda n: lax.rem(n - 2, 3), [N]),
    "lax.div of ints": (lambda n: lax.div(n - 2, 3), [N]),
    "n / m": (lambda n, m: n / (m + 1), [N, N]),
    "~n": (lambda n: ~n, [N]),
    "n << 2 >> 1": (lambda n: (n << 2) >> 1, [N]),
    "n ^ 3": (lambda n: n ^ 3, [N]),
    "n & m": (lambda n, m: n & m, [N, N]),
    "n ** 2": (lambda n: n**2, [N]),
    "n ** 3": (lambda n: n**3, [N]),
    "2 ** n": (lambda n: 2**n, [N]),
    "x ** 3": (lambda x: x**3, [X]),
    "x ** -2": (lambda x: x**-2, [X]),
    "x ** 0": (lambda x: x**0, [X]),
    "x ** 0.5": (lambda x: x**0.5, [X]),
    "x ** 2.0": (lambda x: x**2.0, [X]),
    "x ** v": (lambda x, v: jnp.abs(x) ** v, [X, _held(6)]),
    "x ** n": (lambda x, n: x**n, [X, N]),
    "2 ** x": (lambda x: 2**x, [X]),
    "jnp.sqrt(abs)": (lambda x: jnp.sqrt(jnp.abs(x) + 1), [X]),
    "p.astype": (lambda p, x: p.astype("float32") * x, [P3, X]),
    "x.astype(int)": (lambda x: x.astype("int32") * x, [X]),
    "x.astype(bool)": (lambda x: x.astype(bool) * x, [X]),
    "n.astype(uint8)": (lambda n: (n - 2).astype("uint8"), [N]),
    "-p": (lambda p: ~p & (p ^ True), [P3]),
    "p + p": (lambda p, q: p + q, [P3, P3]),
    "p * p": (lambda p, q: p * q, [P3, P3]),
    "sum of p": (lambda p: p.sum(-1), [P3]),
    "mean of p": (lambda p: p.mean(-1), [P3]),
    "mean of n": (lambda n: n.mean(-1), [N]),
    "sum of n": (lambda n: n.sum(1), [N]),
    "max of n": (lambda n: n.max(1), [N]),
    "prod of n": (lambda n: n.prod(1), [N]),
    "x == y": (lambda x, y: (x == y) * x, [X, X]),
    "jnp.sign(x) * x": (lambda x: jnp.sign(x) * x, [X]),
    "jnp.round(x, 1)": (lambda x: jnp.round(x, 1) * x, [X]),
    "lax.round away": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO) * x, [X]),
    "lax.reduce_precision": (lambda x: lax.reduce_precision(x, 5, 2), [X]),
    "straight through": (lambda x: x + lax.stop_gradient(jnp.round(x) - x), [X]),
    # reductions
    "jnp.var ddof=1": (lambda x: jnp.var(x, axis=-1, ddof=1), [X]),
    "jnp.std axis=1": (lambda x: jnp.std(x, axis=1), [X]),
    "jnp.average": (lambda x, y: jnp.average(x, axis=1, weights=y * y + 1), [X, X]),
    "jnp.mean where": (lambda x, p: jnp.mean(x, axis=-1, where=p.at[..., 0].set(True)), [X, P3]),
    "jnp.sum where": (lambda x, p: jnp.sum(x, axis=-1, where=p), [X, P3]),
    "jnp.max where": (lambda x, p: jnp.max(x, axis=-1, where=p, initial=-1.0), [X, P3]),
    "jnp.min initial": (lambda x: jnp.min(x, axis=1, initial=0.0), [X]),
    "jnp.prod axis=1": (lambda x: jnp.prod(x, axis=1), [X]),
    "jnp.max of two dims": (lambda x: jnp.max(x, axis=(1, 2), keepdims=True), [X]),
    "jnp.ptp": (lambda x: jnp.ptp(x, axis=-1), [X]),
    "jnp.median": (lambda x: jnp.median(x, axis=1), [X]),
    **{
        f"jnp.quantile {how}": (partial(jnp.quantile, q=0.4, axis=-1, method=how), [X])
        for how in ("linear", "lower", "higher", "midpoint", "nearest")
    },
    "jnp.quantile of several": (lambda x: jnp.quantile(x, jnp.array([0.2, 0.7]), axis=-1), [X]),
    "jnp.nanmax": (lambda x: jnp.nanmax(jnp.where(x == 1, jnp.nan, x), axis=1, initial=0.0), [X]),
    "jnp.nanmean": (lambda x: jnp.nanmean(jnp.where(x == 1, jnp.nan, x).at[..., 0].set(0), 1), [X]),
    "lax.reduce of products": (lambda x: lax.reduce(x, 1.0, lax.mul, (2,)), [X]),
    "lax.reduce_xor": (lambda n: lax.reduce_xor(n, (2,)), [N]),
    "lax.reduce_and of ints": (lambda n: lax.reduce_and(n, (2,)), [N]),
    "lax.reduce_or of ints": (lambda n: lax.reduce_or(n, (2,)), [N]),
    "jnp.argmax": (lambda x: jnp.argmax(x, axis=-1)[..., None] * x, [X]),
    "jnp.argmin of ints": (lambda n: jnp.argmin(n, axis=1), [N]),
    "lax.cumsum reverse": (lambda x: lax.cumsum(x, 1, reverse=True), [X]),
    "lax.cummax reverse": (lambda x: lax.cummax(x, 1, reverse=True), [X]),
    "lax.cumprod": (lambda x: lax.cumprod(x, 2), [X]),
    "lax.cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), [X]),
    "associative max": (lambda x: lax.associative_scan(jnp.maximum, x, axis=1), [X]),
    "associative product": (lambda x: lax.associative_scan(jnp.multiply, x, axis=1), [X]),
    "jnp.diff n=2": (lambda x: jnp.diff(x, n=2, axis=-1), [X]),
    "jnp.gradient": (lambda x: jnp.gradient(x, axis=1), [X]),
    "jnp.trapezoid": (lambda x: jnp.trapezoid(x, dx=0.5, axis=1), [X]),
    "jnp.cov": (_each(jnp.cov), [X]),
    "jnp.corrcoef": (_each(lambda x: jnp.corrcoef(x + jnp.arange(6.0) ** 2)), [X]),
    **{
        f"linalg.norm ord={o}": (partial(linalg.norm, ord=o, axis=-1), [X])
        for o in (1, 2, 3, np.inf, -np.inf, 0)
    },
    **{
        f"linalg.norm of matrices {o}": (partial(linalg.norm, ord=o, axis=(1, 2)), [X])
        for o in ("fro", "nuc", 1, np.inf, 2)
    },
    # order
    "jnp.sort descending": (lambda x: jnp.sort(x, axis=-1, descending=True), [X]),
    "jnp.argsort": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), 1), [X]),
    "lax.sort of two": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), [X, X]),
    "lax.sort two keys": (lambda x, y: lax.sort((x, y, x * y), dimension=2, num_keys=2), [X, X]),
    "lax.sort_key_val": (lambda n, x: lax.sort_key_val(n, x), [N, X]),
    "lax.top_k": (lambda x: lax.top_k(x, 3)[0], [X]),
    "lax.top_k places": (lambda x: jnp.take_along_axis(x, lax.top_k(x, 2)[1], -1), [X]),
    "lax.approx_max_k": (lambda x: lax.approx_max_k(x, 2)[0], [X]),
    "jnp.partition": (lambda x: jnp.partition(x, 2, axis=-1), [X]),
    "jnp.searchsorted": (lambda x: x * jnp.searchsorted(jnp.arange(-1.0, 2.0), x), [X]),
    "jnp.digitize": (lambda x: x * jnp.digitize(x, jnp.arange(-1.0, 2.0)), [X]),
    "jnp.interp": (lambda x: jnp.interp(x, jnp.arange(-1.0, 2.0), jnp.arange(3.0) ** 2), [X]),
    "jnp.lexsort": (lambda x, n: jnp.take_along_axis(x, jnp.lexsort((x, n)), -1), [X, N]),
    "jnp.histogram": (
        _each(lambda x: jnp.histogram(x, bins=4, range=(-2.0, 2.0))[0] * x.sum()),
        [R],
    ),
    "jnp.bincount": (_each(lambda n: jnp.bincount(n, length=4)), [IDS]),
    "jnp.isin": (lambda n, x: jnp.isin(n, jnp.array([1, 3])) * x, [N, X]),
    # pieces
    **{
        f"jnp.pad {how}": (partial(jnp.pad, pad_width=((0, 0), (1, 2), (2, 1)), mode=how), [X])
        for how in (
            *("constant", "edge", "reflect", "symmetric", "wrap"),
            *("mean", "maximum", "minimum", "median", "linear_ramp"),
        )
    },
    "lax.pad inside": (lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, 0, 1), (-1, 2, 0))), [X]),
    "jnp.roll": (lambda x: jnp.roll(x, 1, axis=1), [X]),
    "jnp.roll of two": (lambda x: jnp.roll(x, (1, 2), axis=(1, 2)), [X]),
    "jnp.repeat": (lambda x: jnp.repeat(x, 2, axis=1), [X]),
    "jnp.repeat by counts": (
        lambda x: jnp.repeat(x, np.array([1, 0, 2, 1]), axis=1, total_repeat_length=4),
        [X],
    ),
    "jnp.tile": (lambda x: jnp.tile(x, (1, 2, 1)), [X]),
    "jnp.flip": (lambda x: jnp.flip(x, (1, 2)), [X]),
    "jnp.rot90": (lambda x: jnp.rot90(x, 1, (1, 2)), [X]),
    "jnp.split": (lambda x: jnp.split(x, 3, axis=-1), [X]),
    "jnp.array_split": (lambda x: jnp.array_split(x, 4, axis=-1), [X]),
    "jnp.stack": (lambda x, y: jnp.stack([x, y], axis=2), [X, X]),
    "jnp.concatenate with a weight": (
        lambda x, w: jnp.concatenate([x, jnp.broadcast_to(w, (B, 2, 6))], 1),
        [X, _held(2, 6)],
    ),
    "jnp.unstack": (lambda x: jnp.unstack(x, axis=1), [X]),
    "jnp.tril": (lambda x: jnp.tril(x, 1), [X]),
    "jnp.triu": (lambda x: jnp.triu(x, -1), [X]),
    "jnp.trace": (lambda x: jnp.trace(x, 1, axis1=1, axis2=2), [X]),
    "jnp.diagonal": (lambda x: jnp.diagonal(x, -1, axis1=1, axis2=2), [X]),
    "jnp.diag": (_each(jnp.diag), [R]),
    "jnp.vander": (_each(lambda x: jnp.vander(x, 3)), [R]),
    "jnp.meshgrid": (_each(lambda x: jnp.meshgrid(x, x[:3])), [R]),
    "jnp.insert": (lambda x: jnp.insert(x, 2, 1.0, axis=1), [X]),
    "jnp.delete": (lambda x: jnp.delete(x, 1, axis=1), [X]),
    "jnp.fill_diagonal": (_each(lambda x: jnp.fill_diagonal(x, 1.0, inplace=False)), [X]),
    "x[:, ::2]": (lambda x: x[:, ::2, ::-1], [X]),
    "x[:, 1:, None]": (lambda x: x[:, 1:, None, 2], [X]),
    "x[:, -1]": (lambda x: x[:, -1], [X]),
    "x[..., list]": (lambda x: x[..., jnp.array([0, 0, -1, 5])], [X]),
    "x[:, i, j]": (lambda x: x[:, jnp.array([0, 1, 1]), jnp.array([2, 2, 5])], [X]),
    "x[:, mask]": (lambda x: x[:, np.array([True, False, True, True])], [X]),
    "x[rows, i]": (lambda x, i: x[jnp.arange(B)[:, None], i], [X, IDS]),
    "each x[i]": (_each(lambda x, i: x[i]), [X, IDS]),
    "each x[:, i]": (_each(lambda x, i: x[:, i]), [X, IDS]),
    "each x[i, j]": (_each(lambda x, i: x[i, i[::-1]]), [X, IDS]),
    "w[i]": (lambda i, w: w[i], [IDS, _held(6, 8)]),
    "w[i] of three dims": (lambda i, w: w[i], [IDS, _held(6, 2, 4)]),
    "jnp.take axis=1": (lambda x: jnp.take(x, jnp.array([3, 0, 0]), axis=1), [X]),
    "jnp.take clip": (lambda x: jnp.take(x, jnp.array([9, 0, -2]), axis=1, mode="clip"), [X]),
    "jnp.take wrap": (lambda x: jnp.take(x, jnp.array([9, 0, -2]), axis=1, mode="wrap"), [X]),
    "jnp.take fill": (
        lambda x: jnp.take(x, jnp.array([9, 0, -2]), axis=1, mode="fill", fill_value=0),
        [X],
    ),
    "jnp.take_along_axis": (lambda x, n: jnp.take_along_axis(x, n, axis=1), [X, N]),
    "jnp.take_along_axis last": (lambda x, n: jnp.take_along_axis(x, n, axis=-1), [X, N]),
    "jnp.choose": (lambda n, x, y: jnp.choose(n, [x, y, x * y, x + y]), [N, X, X]),
    "lax.index_in_dim": (lambda x: lax.index_in_dim(x, 2, 1), [X]),
    "lax.dynamic_slice": (_each(lambda x, i: lax.dynamic_slice(x, (i[0], 0), (2, 3))), [X, IDS]),
    "lax.dynamic_update_slice": (
        _each(lambda x, i: lax.dynamic_update_slice(x, x[:2, :3] * 2, (i[0], i[1]))),
        [X, IDS],
    ),
    "lax.dynamic_index_in_dim": (_each(lambda x, i: lax.dynamic_index_in_dim(x, i[0])), [X, IDS]),
    **{
        f"at.{name} of each": (_at(name), [X, IDS])
        for name in "set add multiply min max divide".split()
    },
    "at.add of a number": (_at("add", 0.5), [X, IDS]),
    "at.power": (_at("power", 2.0), [X, IDS]),
    "at.set of a column": (lambda x: x.at[:, :, 2].set(0.0), [X]),
    "at.add of a column": (lambda x: x.at[:, 1:3].add(1.0), [X]),
    "at.max of a row": (lambda x: x.at[:, 0].max(x[:, 1]), [X]),
    "at.min of rows": (lambda x: x.at[:, jnp.array([0, 2])].min(0.0), [X]),
    "at.multiply of a row": (lambda x: x.at[:, 0].multiply(x[:, 1]), [X]),
    "at.get fill": (lambda x: x.at[:, jnp.array([0, 9])].get(mode="fill", fill_value=1.0), [X]),
    "at.set of a mask": (lambda x: jnp.where(x > 0, 1.0, x).at[:, 1].set(2.0), [X]),
    **{
        f"jax.ops.segment_{name}": (_each(partial(_finite_segments, name)), [X, IDS])
        for name in ("max", "min")
    },
    "segment_sum over the batch": (
        lambda x, i: jax.ops.segment_sum(x.reshape(-1, 6), i.reshape(-1), num_segments=4),
        [X, IDS],
    ),
    "segment_max over the batch": (
        lambda x, i: jnp.maximum(
            jax.ops.segment_max(x.reshape(-1, 6), i.reshape(-1), num_segments=4), -9
        ),
        [X, IDS],
    ),
    # products
    **{f"einsum {text}": (partial(jnp.einsum, text), shapes) for text, shapes in EINSUMS.items()},
    "jnp.tensordot": (lambda x, w: jnp.tensordot(x, w, 2), [X, _held(4, 6, 2)]),
    "jnp.dot": (jnp.dot, [X, _held(6, 8)]),
    "jnp.inner": (jnp.inner, [X, _held(8, 6)]),
    "jnp.outer of each": (_each(jnp.outer), [R, R]),
    "jnp.kron of each": (_each(jnp.kron), [R, R]),
    "jnp.cross": (lambda x, y: jnp.cross(x[..., :3], y[..., 3:]), [X, X]),
    "jnp.matmul of ints": (lambda n, m: n @ m.mT, [N, N]),
    "lax.dot_general": (
        lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))),
        [X, X],
    ),
    "lax.batch_matmul": (lambda x, y: lax.batch_matmul(x, y.mT), [X, X]),
    "jnp.convolve": (_each(lambda x, y: jnp.convolve(x, y[:3], "same")), [R, R]),
    "jnp.correlate": (_each(lambda x, y: jnp.correlate(x, y[:3])), [R, R]),
    "jnp.polyval": (lambda x, v: jnp.polyval(v, x), [X, _held(3)]),
    "linalg.matrix_power": (lambda x: linalg.matrix_power(x, 3), [S]),
    "linalg.multi_dot": (_each(lambda x, y: linalg.multi_dot([x, y.T, x])), [X, X]),
    "scipy.linalg.expm": (_each(lambda x: jax.scipy.linalg.expm(x * 0.3)), [S]),
    "solve_triangular": (
        _each(lambda x, y: jax.scipy.linalg.solve_triangular(x + 5 * jnp.eye(4), y, lower=True)),
        [S, X],
    ),
    "cho_solve": (
        _each(
            lambda x, y: jax.scipy.linalg.cho_solve(
                jax.scipy.linalg.cho_factor(x @ x.T + 4 * jnp.eye(4)), y
            )
        ),
        [S, X],
    ),
    "linalg.lstsq": (_each(lambda x, y: linalg.lstsq(x.T, y.T[:, 0])[0]), [X, X]),
    # images
    "conv": (_conv(), [NHWC, _held(3, 3, 4, 8)]),
    "conv valid": (_conv(padding="VALID"), [NHWC, _held(3, 3, 4, 8)]),
    "conv strides": (_conv(window_strides=(2, 1)), [NHWC, _held(3, 3, 4, 8)]),
    "conv pads": (_conv(padding=((0, 1), (2, 0))), [NHWC, _held(3, 3, 4, 8)]),
    "conv negative pads": (_conv(padding=((-1, 1), (0, 0))), [NHWC, _held(2, 2, 4, 8)]),
    "conv dilated": (_conv(rhs_dilation=(2, 2)), [NHWC, _held(3, 3, 4, 8)]),
    "conv of a dilated image": (_conv(lhs_dilation=(2, 2)), [NHWC, _held(3, 3, 4, 8)]),
    "conv of a dilated image in groups": (
        _conv(lhs_dilation=(2, 2), feature_group_count=2),
        [NHWC, _held(3, 3, 2, 8)],
    ),
    "lax.reshape in another order": (lambda x: lax.reshape(x, (B, 24), (0, 2, 1)), [X]),
    "conv in groups": (_conv(feature_group_count=2), [NHWC, _held(3, 3, 2, 8)]),
    "conv of each channel": (_conv(feature_group_count=4), [NHWC, _held(3, 3, 1, 8)]),
    "conv in batch groups": (_conv(batch_group_count=2), [NHWC, _held(3, 3, 4, 8)]),
    "conv NCHW": (_conv(dims=("NCHW", "OIHW", "NCHW")), [NCHW, _held(8, 4, 3, 3)]),
    "conv 1d": (
        _conv(dims=("NHC", "HIO", "NHC"), window_strides=(1,), padding="SAME"),
        [X, _held(3, 6, 8)],
    ),
    "lax.conv": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), [NCHW, _held(8, 4, 3, 3)]),
    "lax.conv_transpose": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        [NHWC, _held(3, 3, 4, 8)],
    ),
    "lax.conv_transpose kernel": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "VALID", transpose_kernel=True),
        [NHWC, _held(3, 3, 8, 4)],
    ),
    "patches": (
        lambda x: lax.conv_general_dilated_patches(x, (2, 2), (2, 2), "VALID"),
        [NCHW],
    ),
    "max pool": (_windows(-jnp.inf, lax.max), [NHWC]),
    "max pool overlapping": (_windows(-jnp.inf, lax.max, window_strides=(1, 1, 1, 1)), [NHWC]),
    "min pool": (_windows(jnp.inf, lax.min), [NHWC]),
    "sum pool": (_windows(0.0, lax.add), [NHWC]),
    "sum pool dilated": (_windows(0.0, lax.add, window_dilation=(1, 2, 1, 1)), [NHWC]),
    "product pool": (_windows(1.0, lax.mul), [NHWC]),
    "jax.image.resize": (lambda x: jax.image.resize(x, (B, 9, 4, 4), "bilinear"), [NHWC]),
    "jax.image.resize cubic": (lambda x: jax.image.resize(x, (B, 9, 4, 4), "cubic"), [NHWC]),
    "jax.image.resize nearest": (lambda x: jax.image.resize(x, (B, 9, 4, 4), "nearest"), [NHWC]),
    "convolve2d": (
        _each(lambda x: jax.scipy.signal.convolve2d(x, jnp.ones((3, 3)), "same")),
        [X],
    ),
    "fftconvolve": (_each(lambda x, y: jax.scipy.signal.fftconvolve(x, y, "same")), [R, R]),
    # networks
    "nn.one_hot": (lambda n, x: nn.one_hot(n, 6)[..., 0] * x, [N, X]),
    "nn.one_hot outside": (lambda n: nn.one_hot(n - 1, 2, axis=1), [N]),
    "nn.softmax where": (lambda x, p: nn.softmax(x, where=p.at[..., 0].set(True)), [X, P3]),
    "nn.softmax axis=1": (lambda x: nn.softmax(x, axis=1), [X]),
    "nn.softmax of two dims": (lambda x: nn.softmax(x, axis=(1, 2)), [X]),
    "nn.log_softmax where": (
        lambda x, p: jnp.where(p, nn.log_softmax(x, where=p | (jnp.arange(6) == 0)), 0.0),
        [X, P3],
    ),
    "nn.logsumexp b": (lambda x, y: nn.logsumexp(x, axis=-1, b=y * y + 1), [X, X]),
    "nn.logsumexp sign": (
        lambda x, y: nn.logsumexp(x, axis=-1, b=y + 9, return_sign=True),
        [X, X],
    ),
    "nn.logsumexp where": (
        lambda x, p: nn.logsumexp(x, axis=-1, where=p.at[..., 0].set(True)),
        [X, P3],
    ),
    "softmax of -inf": (
        lambda x, p: nn.softmax(jnp.where(p.at[..., 0].set(True), x, -jnp.inf)),
        [X, P3],
    ),
    "nn.gelu exact": (lambda x: nn.gelu(x, approximate=False), [X]),
    "nn.leaky_relu": (lambda x: nn.leaky_relu(x, 0.2), [X]),
    "nn.elu": (lambda x: nn.elu(x, 0.5), [X]),
    "nn.celu": (lambda x: nn.celu(x, 0.5), [X]),
    "nn.glu": (lambda x: nn.glu(x, axis=1), [X]),
    "nn.standardize": (lambda x: nn.standardize(x, axis=-1, epsilon=1e-3), [X]),
    "nn.squareplus": (lambda x: nn.squareplus(x, 2.0), [X]),
    "attention": (lambda q, k, v: nn.dot_product_attention(q, k, v), [Q, Q, Q]),
    "attention causal": (
        lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True),
        [Q, Q, Q],
    ),
    "attention in a window": (
        lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=2),
        [Q, Q, Q],
    ),
    "attention with a mask": (
        lambda q, k, v, p: nn.dot_product_attention(q, k, v, mask=p.at[..., 0].set(True)),
        [Q, Q, Q, ((B, 1, 8, 8), P)],
    ),
    "attention with a bias": (
        lambda q, k, v, w: nn.dot_product_attention(q, k, v, bias=w),
        [Q, Q, Q, _held(1, 4, 8, 8)],
    ),
    "layer norm by hand": (
        lambda x, v: (
            (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * v
        ),
        [X, _held(6)],
    ),
    "rms norm by hand": (
        lambda x, v: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * v,
        [X, _held(6)],
    ),
    # losses
    "cross entropy": (
        lambda x, i: -jnp.take_along_axis(nn.log_softmax(x), i[..., None], -1).mean(),
        [X, IDS],
    ),
    **{f"optax.{name}": (getattr(optax.losses, name), shapes) for name, shapes in LOSSES.items()},
    "optax.triplet": (lambda x, y, z: optax.losses.triplet_margin_loss(x, y, z), [X, X, X]),
    "optax.kl_divergence": (
        lambda x, y: optax.losses.kl_divergence(nn.log_softmax(x), nn.softmax(y)),
        [X, X],
    ),
    "optax.ctc_loss": (
        lambda x, i: optax.ctc_loss(x, jnp.zeros(x.shape[:2]), i[:, :2], jnp.zeros((B, 2))),
        [X, IDS],
    ),
    "optax.smooth_labels": (
        lambda x, i: optax.softmax_cross_entropy(x, optax.smooth_labels(nn.one_hot(i, 6), 0.1)),
        [X, IDS],
    ),
    "optax.multiclass_hinge": (
        _each(_each(optax.losses.multiclass_hinge_loss)),
        [X, IDS],
    ),
    "optax.ranking_softmax": (
        lambda x, y: optax.losses.ranking_softmax_loss(x, y * y, reduce_fn=None),
        [X, X],
    ),
    # special functions and densities
    "special.betainc": (
        lambda x, y: jax.scipy.special.betainc(2.0, 3.0, nn.sigmoid(x * y)),
        [X, X],
    ),
    "special.gammainc": (lambda x: jax.scipy.special.gammainc(2.0, x * x + 1), [X]),
    "special.polygamma": (lambda x: jax.scipy.special.polygamma(1, x * x + 1), [X]),
    "special.zeta": (lambda x: jax.scipy.special.zeta(x * x + 2, 1.5), [X]),
    "special.multigammaln": (lambda x: jax.scipy.special.multigammaln(x * x + 3, 2), [X]),
    "special.expn": (lambda x: jax.scipy.special.expn(2, x * x + 1), [X]),
    "special.xlogy": (lambda x, y: jax.scipy.special.xlogy(x, y * y + 1), [X, X]),
    "special.rel_entr": (lambda x, y: jax.scipy.special.rel_entr(x * x + 1, y * y + 1), [X, X]),
    **{
        f"stats.{name}": (function, [X, X])
        for name, function in {
            "norm.logpdf": lambda x, y: stats.norm.logpdf(x, y, 2.0),
            "norm.logcdf": stats.norm.logcdf,
            "norm.ppf": lambda x, y: stats.norm.ppf(nn.sigmoid(x)),
            "t.logpdf": lambda x, y: stats.t.logpdf(x, y * y + 1),
            "gamma.logpdf": lambda x, y: stats.gamma.logpdf(x * x + 1, y * y + 1),
            "beta.logpdf": lambda x, y: stats.beta.logpdf(nn.sigmoid(x), y * y + 1, 2.0),
            "poisson.logpmf": lambda x, y: stats.poisson.logpmf(jnp.round(x * x), y * y + 1),
            "laplace.logpdf": stats.laplace.logpdf,
            "logistic.cdf": stats.logistic.cdf,
            "cauchy.logpdf": stats.cauchy.logpdf,
            "expon.logpdf": lambda x, y: stats.expon.logpdf(x * x, y * 0),
            "uniform.logpdf": lambda x, y: stats.uniform.logpdf(nn.sigmoid(x), 0.0, y * y + 2),
            "truncnorm.logpdf": lambda x, y: stats.truncnorm.logpdf(nn.sigmoid(x), -1.0, y * y + 2),
        }.items()
    },
    "stats.multivariate_normal": (
        _each(_each(lambda x: stats.multivariate_normal.logpdf(x, jnp.zeros(6), jnp.eye(6) * 2))),
        [X],
    ),
    # control flow
    "lax.scan": (_scan, [X, _held(6, 8)]),
    "lax.map": (lambda x: lax.map(jnp.sin, jnp.moveaxis(x, 1, 0)), [X]),
    "lax.cond of each": (
        _each(lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda y: y * 2, x)),
        [X],
    ),
    "lax.switch of each": (
        _each(lambda i, x: lax.switch(i[0], [jnp.sin, jnp.cos, jnp.tanh], x)),
        [IDS, X],
    ),
    "lax.fori_loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, y: y * 0.5 + i * x, x),
        [X],
    ),
    "jax.checkpoint": (jax.checkpoint(lambda x: jnp.maximum(jnp.sin(x), 0)), [X]),
    "jax.grad inside": (_each(jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2))), [X]),
    "jax.jvp inside": (lambda x, y: jax.jvp(jnp.sin, (x,), (y,))[1], [X, X]),
    "jax.hessian inside": (_each(jax.hessian(lambda x: jnp.sum(jnp.sin(x) ** 2))), [R]),
}
"""By name: a function and the shapes of its operands; those without `B` in front are parameters."""
