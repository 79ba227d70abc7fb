"""What JAX spellings are put into: a small model of layers, and decorators that list it.

A spelling is as small as it can be said. One of a layer is ``init(key) -> params`` and
``apply(params, x) -> x`` of [b, s, c], and stands in four layers; one of a whole model gives
``init(key)`` and ``loss(params, batch)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks.spellings.spelling import Spelling, add

B, S, C, H, V = 8, 16, 32, 4, 64
"""Samples, length, channels, heads, words."""
LAYERS = 4
Tree = Any
Batch = Mapping[str, Any]
Init = Callable[[Any], Tree]
Apply = Callable[[Tree, Any], Any]
Loss = Callable[[Tree, Batch], Any]


def dense(key: Any, n_in: int, n_out: int) -> Tree:
    """A weight [n_in, n_out] and a bias."""
    return {"w": jax.random.normal(key, (n_in, n_out)) / n_in**0.5, "b": jnp.zeros(n_out)}


def linear(p: Tree, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def norm(x: Any) -> Any:
    """Over the last dim, without parameters."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def tokens(step: int = 0) -> Batch:
    """``tokens`` and ``labels`` [b, s]."""
    draws = np.random.default_rng(step)
    ids, labels = (draws.integers(0, V, (B, S)).astype(np.int32) for _ in range(2))
    return {"tokens": ids, "labels": labels}


def padded(step: int = 0) -> Batch:
    """`tokens`, and ``mask`` [b, s], 1 where there is a word."""
    lengths = np.array([16, 5, 9, 12, 3, 16, 7, 10])
    return {**tokens(step), "mask": (np.arange(S) < lengths[:, None]).astype(np.int32)}


def numbers(step: int = 0) -> Batch:
    """``x`` and ``y`` [b, s, c]."""
    draws = np.random.default_rng(step)
    x, y = (draws.normal(size=(B, S, C)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": y}


def next_word(logits: Any, labels: Any) -> Any:
    """The mean cross-entropy of logits [b, s, v]."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def layer(
    thing: str, way: str, source: str, init: Init, needs: str = ""
) -> Callable[[Apply], Apply]:
    """Lists ``apply(params, x)`` with the parameters that ``init(key)`` makes, in every layer."""

    def listed(apply: Apply) -> Apply:
        def start(key: Any) -> Tree:
            first, last, *keys = jax.random.split(key, 2 + LAYERS)
            layers = []
            for one in keys:
                inner, up, down = jax.random.split(one, 3)
                layers.append(
                    {"inner": init(inner), "up": dense(up, C, 2 * C), "down": dense(down, 2 * C, C)}
                )
            embed = jax.random.normal(first, (V, C))
            return {"embed": embed, "layers": layers, "head": dense(last, C, V)}

        def loss(params: Tree, batch: Batch) -> Any:
            x = params["embed"][batch["tokens"]]
            for p in params["layers"]:
                x = x + apply(p["inner"], x)
                x = x + linear(p["down"], jax.nn.gelu(linear(p["up"], norm(x))))
            return next_word(linear(params["head"], norm(x)), batch["labels"])

        def workload() -> autopar.Workload:
            return autopar.Workload(loss=loss, init=start, batch=tokens, clip_norm=1.0)

        add(Spelling("jax", thing, way, source, workload, needs))
        return apply

    return listed


def model(
    thing: str,
    way: str,
    source: str,
    init: Init,
    batch: Callable[..., Batch] = tokens,
    needs: str = "",
    **settings: Any,
) -> Callable[[Loss], Loss]:
    """Lists ``loss(params, batch)``; ``settings`` are those of a `Workload`."""

    def listed(loss: Loss) -> Loss:
        def workload() -> autopar.Workload:
            return autopar.Workload(loss=loss, init=init, batch=batch, clip_norm=1.0, **settings)

        add(Spelling("jax", thing, way, source, workload, needs))
        return loss

    return listed
