"""Primitives of JAX that models meet, each in one line on ``h`` [8, 6, 8] of a small model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar import Workload

Form = Callable[[Any], Any]


def _p(h: Any, count: int) -> Any:
    """Places, of which some occur twice."""
    return (jnp.arange(h.size).reshape(h.shape) * 5) % count


def _i(h: Any, count: int) -> Any:
    return _p(h, count)[..., 0]


def _n(h: Any) -> Any:
    """A number that is known when the program runs."""
    return jnp.sum(_p(h, 3)) % 3


def _m(h: Any) -> Any:
    return h.mT @ h + jnp.eye(8)


def _space(h: Any) -> Any:
    return h.reshape(8, 6, 4, 2)


def _each(of: Callable[[Any, Any], Any], count: int) -> Form:
    return lambda h: jax.vmap(of)(h, _i(h, count))


def _ragged(h: Any) -> Any:
    weights = jnp.stack([jnp.eye(8) * i for i in (1.0, 2.0, 3.0)])
    return lax.ragged_dot(h.reshape(48, 8), weights, jnp.array([10, 20, 18])).reshape(h.shape)


def _top_mask(h: Any) -> Any:
    rows, columns = jnp.arange(8)[:, None, None], jnp.arange(6)[None, :, None]
    return h * jnp.zeros_like(h).at[rows, columns, lax.top_k(h, 2)[1]].set(1.0)


FORMS: Mapping[str, Form] = {
    # scatters
    "at.set of a slice": lambda h: h.at[:, 2:4].set(0.5) * h,
    "at.add of rows": lambda h: h.at[:, jnp.array([0, 2, 2])].add(h[:, :3]),
    "at.multiply": lambda h: h.at[:, 0].multiply(2.0),
    "at.max under vmap": _each(lambda x, i: jnp.zeros((4, 8)).at[i].max(x), 4),
    "at.set by rows and places": lambda h: (
        jnp.zeros_like(h).at[jnp.arange(8)[:, None], _i(h, 6)].set(h)
    ),
    "mask of top_k": _top_mask,
    "segment_sum of each sample": _each(lambda x, i: jax.ops.segment_sum(x, i, num_segments=3), 3),
    "segment_sum over the batch": lambda h: jax.ops.segment_sum(
        h.reshape(48, 8), _i(h, 5).reshape(48), num_segments=5
    ),
    "at.apply": lambda h: h.at[:, 1].apply(jnp.sin),
    # gathers and slices
    "x[rows, i]": lambda h: h[jnp.arange(8)[:, None], _i(h, 6)],
    "x[:, i, j]": lambda h: h[:, jnp.array([0, 1, 2]), jnp.array([3, 4, 5])],
    "at.get with a fill value": lambda h: h.at[:, jnp.array([0, 9])].get(
        mode="fill", fill_value=0.0
    ),
    "dynamic_slice": lambda h: lax.dynamic_slice_in_dim(h, _n(h), 2, axis=1),
    "dynamic_slice of each sample": lambda h: jax.vmap(
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 2)
    )(h, _i(h, 4)[:, 0]),
    "dynamic_update_slice": lambda h: lax.dynamic_update_slice_in_dim(h, h[:, :2], _n(h), axis=1),
    "roll by a number of the run": lambda h: jnp.roll(h, _n(h), axis=1),
    "repeat by counts": lambda h: jnp.repeat(
        h, jnp.array([1, 0, 2, 1, 1, 1]), axis=1, total_repeat_length=6
    ),
    "diagonal": lambda h: jnp.diagonal(h[:, :6, :6], axis1=1, axis2=2),
    "tile": lambda h: jnp.tile(h, (1, 2, 1)),
    # order
    "median": lambda h: jnp.median(h, -1),
    "quantile": lambda h: jnp.quantile(h, 0.3, axis=-1),
    "argpartition": lambda h: jnp.take_along_axis(h, jnp.argpartition(h, 3, axis=-1)[..., :3], -1),
    "searchsorted": lambda h: h * jnp.searchsorted(jnp.linspace(-1, 1, 5), h),
    "interp": lambda h: jnp.interp(h, jnp.linspace(-1, 1, 5), jnp.arange(5.0)),
    "top_k": lambda h: lax.top_k(h, 3)[0],
    "sort of several": lambda h: lax.sort((_p(h, 3), h), dimension=-1, num_keys=2)[1],
    "bincount": lambda h: h * jax.vmap(lambda i: jnp.bincount(i, length=6))(_i(h, 6))[..., None],
    # products and space
    "ragged_dot": _ragged,
    "conv_transpose": lambda h: lax.conv_transpose(
        _space(h), jnp.ones((3, 3, 2, 2)), (2, 2), "SAME"
    ),
    "conv of each channel": lambda h: lax.conv_general_dilated(
        h,
        jnp.ones((3, 1, 8)),
        (1,),
        "SAME",
        feature_group_count=8,
        dimension_numbers=("NHC", "HIO", "NHC"),
    ),
    "image.resize": lambda h: jax.image.resize(_space(h), (8, 12, 8, 2), "bilinear"),
    "max pool": lambda h: lax.reduce_window(
        _space(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
    ),
    "prod": lambda h: jnp.prod(h + 2, axis=1),
    "integer bits": lambda h: ((_p(h, 9) >> 1) & 1) * h,
    "igamma": lambda h: lax.igamma(jnp.full_like(h, 2.0), h + 3),
    # matrices
    "cholesky": lambda h: jnp.linalg.cholesky(_m(h)),
    "solve": lambda h: jnp.linalg.solve(_m(h), h.mT),
    "inv": lambda h: jnp.linalg.inv(_m(h)),
    "det": lambda h: jnp.linalg.det(_m(h)),
    "slogdet": lambda h: jnp.linalg.slogdet(_m(h))[1],
    "eigh": lambda h: jnp.linalg.eigh(h.mT @ h + jnp.diag(jnp.arange(8.0)))[0],
    "qr": lambda h: jnp.linalg.qr(h.mT[..., :3] + jnp.eye(8)[:, :3])[1],
    # branches and loops
    "cond": lambda h: lax.cond(h.mean() > 0, jnp.sin, jnp.cos, h),
    "switch": lambda h: lax.switch(_n(h), [jnp.sin, jnp.cos, jnp.tanh], h),
    "fori_loop that stops at a traced number": lambda h: (
        h * lax.stop_gradient(lax.fori_loop(0, _n(h), lambda i, x: x * 0.5 + i, h))
    ),
    "scan over time": lambda h: lax.scan(
        lambda c, x: (c * 0.9 + x, c), jnp.zeros((8, 8)), jnp.moveaxis(h, 1, 0)
    )[1].transpose(1, 0, 2),
    "map": lambda h: lax.map(lambda x: jnp.sin(x) * 2, jnp.moveaxis(h, 1, 0)).transpose(1, 0, 2),
    # complex numbers
    "fft": lambda h: jnp.fft.fft(h).real,
    "rfft": lambda h: jnp.fft.irfft(jnp.fft.rfft(h, axis=1) * 2, axis=1),
    "pairs as complex numbers": lambda h: jnp.abs(lax.complex(h[..., ::2], h[..., 1::2]) + 2),
}
"""By what they are."""


def workload(name: str) -> Workload:
    """A form between two products, both trained."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        made = FORMS[name](jnp.tanh(batch["x"] @ params["a"]))
        plain = jnp.mean(jnp.square(batch["x"] @ params["b"]))
        return jnp.mean(jnp.square(made) * jnp.cos(jnp.arange(made.shape[-1]))) + plain

    def init(key: Any) -> Any:
        a, b = jax.random.split(key)
        return {"a": jax.random.normal(a, (8, 8)) * 0.4, "b": jax.random.normal(b, (8, 8)) * 0.4}

    def batch(step: int = 0) -> Any:
        drawn = np.random.default_rng(step).normal(size=(8, 6, 8))
        return {"x": drawn.astype(np.float32)}

    return Workload(loss=loss, init=init, batch=batch)
