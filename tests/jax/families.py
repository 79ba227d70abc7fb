"""A ResNet and a T5 in JAX: twins of ``examples/04_resnet.py`` and of the T5 of the zoo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tests.jax.models import B, F, H, Model, S, V, W, affine, ids, linear, rms_norm, shape

# --- a ResNet: batch norms, residual blocks of two widths ----------------------------------------


def normed_conv(p: Any, x: Any, stride: int = 1) -> Any:
    """A convolution of x [b, h, w, c] and the batch norm behind it."""
    x = jax.lax.conv_general_dilated(
        x, p["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    mean = x.mean((0, 1, 2))
    variance = jnp.square(x - mean).mean((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]


def residual(p: Any, x: Any) -> Any:
    h = jax.nn.relu(normed_conv(p["first"], x))
    return jax.nn.relu(x + normed_conv(p["second"], h))


def resnet(depth: int = 2, narrow: int = 16, wide: int = 32, classes: int = 10) -> Model:
    def stack(blocks: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, p: (residual(p, x), None), x, blocks)[0]

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        x = stack(params["narrow"], jax.nn.relu(normed_conv(params["stem"], batch["image"])))
        x = jax.nn.relu(normed_conv(params["widen"], x, stride=2))
        scores = linear(params["head"], stack(params["wide"], x).mean((1, 2)))
        likelihood = jax.nn.log_softmax(scores)
        return -jnp.mean(jnp.take_along_axis(likelihood, batch["label"][:, None], axis=-1))

    def conv(into: int, out: int, *lead: int) -> Any:
        norm = {"scale": shape(*lead, out), "shift": shape(*lead, out)}
        return {"kernel": shape(*lead, 3, 3, into, out), **norm}

    def blocks(width: int) -> Any:
        return {name: conv(width, width, depth) for name in ("first", "second")}

    params = {
        "stem": conv(3, narrow),
        "narrow": blocks(narrow),
        "widen": conv(narrow, wide),
        "wide": blocks(wide),
        "head": affine(classes, wide),
    }
    return Model(loss, params, {"image": shape(B, 8, 8, 3), "label": ids(B)})


# --- a T5: encoder and decoder, relative places, attention across ---------------------------------

BUCKETS, FARTHEST = 8, 32


def places_between(table: Any, length: int, both_ways: bool) -> Any:
    """T5's relative bias [1, h, s, s] from ``table`` [buckets, h] (Raffel et al. 2020, 2.1)."""
    near = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    buckets = BUCKETS // 2 if both_ways else BUCKETS
    behind = (near > 0) * buckets if both_ways else 0
    near = jnp.abs(near) if both_ways else -jnp.minimum(near, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(near, 1) / exact) / math.log(FARTHEST / exact)
    far = jnp.minimum(exact + (ratio * (buckets - exact)).astype(jnp.int32), buckets - 1)
    return table[behind + jnp.where(near < exact, near, far)].transpose(2, 0, 1)[None]


def t5_attention(p: Any, x: Any, memory: Any, bias: Any) -> Any:
    """Queries of x [b, s, w] over ``memory``, without scale; ``bias`` is added to the scores."""
    b, s, _ = x.shape
    q, k, v = (
        (y @ p[name]).reshape(b, -1, H, W // H)
        for name, y in (("q", x), ("k", memory), ("v", memory))
    )
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) + bias, axis=-1)
    return jnp.einsum("bhst,bthd->bshd", weights, v).reshape(b, s, W) @ p["o"]


def t5_layer(p: Any, x: Any, bias: Any, memory: Any = None) -> Any:
    h = rms_norm(p["norm"], x)
    x = x + t5_attention(p["own"], h, h, bias)
    if memory is not None:
        x = x + t5_attention(p["across"], rms_norm(p["across_norm"], x), memory, 0.0)
    h = rms_norm(p["ff_norm"], x)
    return x + jax.nn.relu(h @ p["up"]) @ p["down"]


def t5(layers: int = 3) -> Model:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        labels, embed = batch["labels"], params["embed"]
        places, steps = params["encoder"]["places"], params["decoder"]["places"]
        bias = places_between(places, S, both_ways=True)
        x = embed[batch["input_ids"]]
        x, _ = jax.lax.scan(
            lambda x, p: (t5_layer(p, x, bias), None), x, params["encoder"]["layers"]
        )
        memory = rms_norm(params["encoder"]["norm"], x)
        earlier = jnp.where(jnp.tril(jnp.ones((S, S), bool)), 0.0, -1e9)
        causal = places_between(steps, S, both_ways=False) + earlier
        y = embed[jnp.pad(labels, ((0, 0), (1, 0)))[:, :-1]]
        y, _ = jax.lax.scan(
            lambda y, p: (t5_layer(p, y, causal, memory), None), y, params["decoder"]["layers"]
        )
        scores = rms_norm(params["decoder"]["norm"], y) * W**-0.5 @ embed.T
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], axis=-1)
        )

    heads = {"q": shape(layers, W, W), "k": shape(layers, W, W), "v": shape(layers, W, W)}
    heads["o"] = shape(layers, W, W)
    norm = shape(layers, W)
    layer = {"norm": norm, "own": heads, "ff_norm": norm}
    layer |= {"up": shape(layers, W, F), "down": shape(layers, F, W)}
    across = {"across": heads, "across_norm": norm}
    ends = {"places": shape(BUCKETS, H), "norm": shape(W)}
    params = {
        "embed": shape(V, W),
        "encoder": {**ends, "layers": layer},
        "decoder": {**ends, "layers": {**layer, **across}},
    }
    return Model(loss, params, {"input_ids": ids(B, S), "labels": ids(B, S)})
