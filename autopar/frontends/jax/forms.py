"""How users write the idioms: the functions that `idioms` looks for.

Names of arguments bind what is found. Numbers such as ``eps`` come last.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = Any  # jax.Array; jax is not type-checked here


def softmax(x: Array) -> Array:
    return jax.nn.softmax(x, axis=-1)


def softmax_plain(x: Array) -> Array:
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    return jax.nn.log_softmax(x, axis=-1)


def log_softmax_by_logsumexp(x: Array) -> Array:
    return x - jax.nn.logsumexp(x, axis=-1, keepdims=True)


def gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def gelu_tanh_left(x: Array) -> Array:
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi).astype(x.dtype) * (x + 0.044715 * x**3)))


def gelu_exact(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def gelu_erf(x: Array) -> Array:
    return 0.5 * x * (1 + jax.lax.erf(x / jnp.sqrt(2.0).astype(x.dtype)))


def silu(x: Array) -> Array:
    return jax.nn.silu(x)


def _upcast(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def layer_norm_rsqrt(x: Array, eps: Array) -> Array:
    centred = _upcast(x) - jnp.mean(_upcast(x), -1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


def layer_norm_sqrt(x: Array, eps: Array) -> Array:
    centred = _upcast(x) - jnp.mean(_upcast(x), -1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return (centred / jnp.sqrt(variance + eps)).astype(x.dtype)


def layer_norm_fast(x: Array, eps: Array) -> Array:
    mean = jnp.mean(_upcast(x), -1, keepdims=True)
    variance = jnp.mean(jnp.square(_upcast(x)), -1, keepdims=True) - jnp.square(mean)
    return ((_upcast(x) - mean) * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


def layer_norm_clipped(x: Array, eps: Array) -> Array:
    mean = jnp.mean(_upcast(x), -1, keepdims=True)
    variance = jnp.mean(jnp.square(_upcast(x)), -1, keepdims=True) - jnp.square(mean)
    return ((_upcast(x) - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0) + eps)).astype(x.dtype)


def layer_norm_weighted(x: Array, weight: Array, eps: Array) -> Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred * (jax.lax.rsqrt(variance + eps) * weight)


def layer_norm_flax(x: Array, weight: Array, eps: Array) -> Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(mean))
    return (x - mean) * (jax.lax.rsqrt(variance + eps) * weight)


def rms_norm_rsqrt(x: Array, eps: Array) -> Array:
    y = _upcast(x)
    return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)).astype(x.dtype)


def rms_norm_sqrt(x: Array, eps: Array) -> Array:
    y = _upcast(x)
    return (y / jnp.sqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)).astype(x.dtype)


def row_of_logsumexp(x: Array, labels: Array) -> Array:
    picked = jnp.take_along_axis(x, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(x, axis=-1) - picked


def row_of_logsumexp_optax(x: Array, labels: Array) -> Array:
    picked = jnp.take_along_axis(x, labels[..., None], axis=-1).take(0, axis=-1)
    return jax.nn.logsumexp(x, axis=-1) - picked


def pick_one_hot(x: Array, labels: Array) -> Array:
    return jnp.sum(jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype) * x, axis=-1)


def pick_by_index(x: Array, labels: Array) -> Array:
    return x[jnp.arange(x.shape[0]), labels]
