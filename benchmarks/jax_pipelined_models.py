"""A GPT, a Llama, a T5 and a U-Net in JAX that are deep enough for every schedule: two stages for
each of four places on ``pp``, and eight microbatches for each of two data devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks import jax_models
from benchmarks.jax_zoo_models import encoders
from benchmarks.jax_zoo_models.frame import drawn

BATCH, LENGTH, VOCABULARY, LAYERS = 16, 16, 96, 8
SIDE = 8  # pixels
Tree = Any
Batch = Mapping[str, Any]


def _drawn(shapes: autopar.Workload) -> autopar.Workload:
    """``shapes``, of `jax_models`, with random numbers, and gradients that are clipped."""
    assert shapes.init is not None
    made = jax.eval_shape(shapes.init, jax.random.key(0))
    sizes = jax.tree.map(lambda leaf: tuple(leaf.shape), made)

    def batch(step: int = 0) -> Batch:
        draws = np.random.default_rng(step)
        size = BATCH, LENGTH
        return {n: draws.integers(0, VOCABULARY, size, np.int32) for n in ("tokens", "labels")}

    return autopar.Workload(
        loss=shapes.loss, init=lambda key: drawn(key, sizes), batch=batch, clip_norm=1.0
    )


gpt = _drawn(jax_models.gpt(LAYERS, 32, 4, VOCABULARY, BATCH, LENGTH))
llama = _drawn(jax_models.llama(LAYERS, 32, 4, 2, 64, VOCABULARY, BATCH, LENGTH))


def _t5() -> autopar.Workload:
    parts = encoders.t5(LAYERS // 2)

    def batch(step: int = 0) -> Batch:
        made: Batch = parts.batch(np.random.default_rng(step))
        return made

    return autopar.Workload(loss=parts.loss, init=parts.init, batch=batch, clip_norm=1.0)


t5 = _t5()


def _group_norm(p: Tree, x: Any) -> Any:
    """[b, h, w, c] in groups of four channels."""
    grouped = x.reshape(*x.shape[:3], -1, 4)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(grouped - mean).mean((1, 2, 4), keepdims=True)
    normal = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normal * p["scale"] + p["bias"]


def _convolved(kernel: Any, x: Any, stride: int = 1) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=dims)


def _res_block(p: Tree, x: Any) -> Any:
    """As Ho et al. 2020 ("Denoising diffusion probabilistic models", appendix B) have it."""
    y = _convolved(p["first"], jax.nn.silu(_group_norm(p["norm1"], x)))
    y = _convolved(p["second"], jax.nn.silu(_group_norm(p["norm2"], y)))
    return y + _convolved(p["skip"], x)


def _unet_loss(params: Tree, batch: Batch) -> Any:
    """The mean squared error of a picture from a noisy one."""
    x = _convolved(params["in"], batch["noisy"])
    skips = []
    for p in params["down"]:
        x = _res_block(p, x)
        skips.append(x)
        x = _convolved(p["half"], x, stride=2)
    x = _res_block(params["middle"], x)
    for p in params["up"]:
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        x = _res_block(p, jnp.concatenate([x, skips.pop()], axis=-1))
    return jnp.mean(jnp.square(_convolved(params["out"], x) - batch["image"]))


def _res_shapes(c: int, d: int) -> dict[str, Any]:
    return {
        "norm1": {"scale": (c,), "bias": (c,)},
        "first": (3, 3, c, d),
        "norm2": {"scale": (d,), "bias": (d,)},
        "second": (3, 3, d, d),
        "skip": (1, 1, c, d),
    }


def _unet() -> autopar.Workload:
    shapes = {
        "in": (3, 3, 3, 8),
        "down": [
            _res_shapes(8, 8) | {"half": (3, 3, 8, 8)},
            _res_shapes(8, 16) | {"half": (3, 3, 16, 16)},
        ],
        "middle": _res_shapes(16, 16),
        "up": [_res_shapes(32, 16), _res_shapes(24, 8)],
        "out": (3, 3, 8, 3),
    }

    def batch(step: int = 0) -> Batch:
        draws = np.random.default_rng(step)
        size = BATCH, SIDE, SIDE, 3
        return {n: draws.standard_normal(size, np.float32) for n in ("image", "noisy")}

    return autopar.Workload(
        loss=_unet_loss, init=lambda key: drawn(key, shapes), batch=batch, clip_norm=1.0
    )


unet = _unet()
