"""Small JAX models for the tests, each a loss function with shapes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, S, W, H, F, V = 8, 16, 32, 4, 64, 96


@dataclass(frozen=True)
class Model:
    loss: Callable[[Any, Mapping[str, Any]], Any]
    params: Any
    batch: Mapping[str, Any]


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def ids(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)


def concrete(tree: Any, dtype: str, seed: int = 0, largest: int = V) -> Any:
    """Random values in place of shapes: floats of ``dtype``, integers below ``largest``."""
    rng = np.random.default_rng(seed)

    def make(leaf: Any) -> Any:
        if "int" in str(leaf.dtype):
            return jnp.asarray(rng.integers(0, largest, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.normal(size=leaf.shape) * 0.4, dtype)

    return jax.tree.map(make, tree)


def affine(n: int, k: int, *lead: int) -> dict[str, Any]:
    return {"weight": shape(*lead, n, k), "bias": shape(*lead, n)}


def mlp() -> Model:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        h = jax.nn.relu(batch["x"] @ params["up"]["weight"].T + params["up"]["bias"])
        y = h @ params["down"]["weight"].T + params["down"]["bias"]
        return jnp.mean((y - batch["y"]) ** 2)

    params = {"up": affine(F, W), "down": affine(W, F)}
    return Model(loss, params, {"x": shape(B, W), "y": shape(B, W)})


def uneven() -> Model:
    """Four ranks divide dim 0 of no parameter, and no dim of two of them."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        h = (batch["x"] * params["scale"]) @ params["up"]
        return jnp.mean((h * params["gain"]) ** 2)

    params = {"up": shape(6, 16), "scale": shape(6), "gain": shape()}
    return Model(loss, params, {"x": shape(B, 6)})


def mixed(activation: Callable[[Any], Any] = jax.nn.silu) -> Model:
    """Parameters in float32, which the loss computes with in bfloat16."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        h = activation(batch["x"].astype(jnp.bfloat16) @ low["up"]["weight"].T)
        y = h @ low["down"]["weight"].T + low["down"]["bias"]
        return jnp.mean((y.astype(jnp.float32) + h @ params["up"]["weight"] - batch["y"]) ** 2)

    params = {"up": {"weight": shape(F, W)}, "down": affine(W, F)}
    return Model(loss, params, {"x": shape(B, W), "y": shape(B, W)})


def _picked(scores: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=-1)[:, 0]


def masked() -> Model:
    """A ratio of two sums over the batch: the loss is whole on every device."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        keep = (batch["y"] > 1).astype(jnp.float32)
        return (_picked(batch["x"] @ params["head"], batch["y"]) * keep).sum() / keep.sum()

    return Model(loss, {"head": shape(W, V)}, {"x": shape(B, W), "y": ids(B)})


def contrastive() -> Model:
    """Every sample meets every other one, and is its own label."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        scores = (batch["x"] @ params["left"]) @ (jnp.sin(batch["x"]) @ params["right"]).T
        own = jnp.arange(B)
        return _picked(scores, own).mean() + _picked(scores.T, own).mean()

    return Model(loss, {"left": shape(W, F), "right": shape(W, F)}, {"x": shape(B, W)})


# --- a GPT, with its layers in a scan or in a Python loop ---------------------------------------


def linear(p: Any, x: Any) -> Any:
    return jnp.einsum("...k,nk->...n", x, p["weight"]) + p["bias"]


def norm(p: Any, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * p["weight"] + p["bias"]


def gpt_attention(p: Any, x: Any) -> Any:
    b, s, _ = x.shape
    q, k, v = (linear(p[name], x).reshape(b, s, H, W // H).transpose(0, 2, 1, 3) for name in "qkv")
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(W // H)
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores, axis=-1), v)
    return linear(p["out"], mixed.transpose(0, 2, 1, 3).reshape(b, s, W))


def gpt_block(p: Any, x: Any) -> Any:
    x = x + gpt_attention(p["attention"], norm(p["norm1"], x))
    return x + linear(p["down"], jax.nn.gelu(linear(p["up"], norm(p["norm2"], x))))


def gpt_loss(run: Callable[[Any, Any], Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        places = jnp.arange(batch["tokens"].shape[1])
        x = params["tokens"]["weight"][batch["tokens"]] + params["positions"]["weight"][places]
        x = norm(params["norm"], run(params["blocks"], x))
        logits = x @ params["head"]["weight"].T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
        return -jnp.mean(picked)

    return loss


def gpt_layer(*lead: int) -> Any:
    pair = {"weight": shape(*lead, W), "bias": shape(*lead, W)}
    return {
        "attention": {name: affine(W, W, *lead) for name in ("q", "k", "v", "out")},
        "norm1": pair,
        "norm2": pair,
        "up": affine(F, W, *lead),
        "down": affine(W, F, *lead),
    }


def gpt_params(blocks: Any) -> Any:
    return {
        "tokens": {"weight": shape(V, W)},
        "positions": {"weight": shape(S, W)},
        "blocks": blocks,
        "norm": {"weight": shape(W), "bias": shape(W)},
        "head": {"weight": shape(V, W)},
    }


TOKENS = {"tokens": ids(B, S), "labels": ids(B, S)}


def gpt_scan(layers: int = 3) -> Model:
    def run(blocks: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, p: (gpt_block(p, x), None), x, blocks)[0]

    return Model(gpt_loss(run), gpt_params(gpt_layer(layers)), TOKENS)


def gpt_unrolled(layers: int = 3) -> Model:
    def run(blocks: Any, x: Any) -> Any:
        for p in blocks:
            x = gpt_block(p, x)
        return x

    return Model(gpt_loss(run), gpt_params([gpt_layer() for _ in range(layers)]), TOKENS)


# --- a Llama: grouped queries, rotary embedding, gated MLP, tied head ---------------------------

G = 2


def rms_norm(weight: Any, x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def rotary(x: Any) -> Any:
    """[b, s, h, d], pairs (i, i + d/2)."""
    s, d = x.shape[1], x.shape[3]
    angle = jnp.arange(s)[:, None] / 10000 ** (jnp.arange(d // 2) * 2 / d)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def llama_block(x: Any, p: Any) -> tuple[Any, None]:
    b, s, _ = x.shape
    h = rms_norm(p["norm1"], x)
    q = rotary(jnp.einsum("bsk,kn->bsn", h, p["q"]).reshape(b, s, H, -1))
    k = rotary((h @ p["k"]).reshape(b, s, G, -1))
    v = (h @ p["v"]).reshape(b, s, G, -1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, W) @ p["o"]
    h = rms_norm(p["norm2"], x)
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None


def llama(layers: int = 2) -> Model:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        x = jnp.take(params["embed"], batch["tokens"], axis=0)
        x, _ = jax.lax.scan(jax.checkpoint(llama_block), x, params["layers"])
        logits = rms_norm(params["norm"], x) @ params["embed"].T
        hot = jnp.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - hot)

    kv = G * W // H
    layer = {
        "norm1": shape(layers, W),
        "q": shape(layers, W, W),
        "k": shape(layers, W, kv),
        "v": shape(layers, W, kv),
        "o": shape(layers, W, W),
        "norm2": shape(layers, W),
        "gate": shape(layers, W, F),
        "up": shape(layers, W, F),
        "down": shape(layers, F, W),
    }
    return Model(loss, {"embed": shape(V, W), "layers": layer, "norm": shape(W)}, TOKENS)


def convnet() -> Model:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        x = batch["image"]  # [b, h, w, c]
        for p in (params["first"], params["second"]):
            x = jax.lax.conv_general_dilated(
                x, p["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + p["bias"])
        logits = x.mean(axis=(1, 2)) @ params["head"]
        likelihood = jax.nn.log_softmax(logits)
        return -jnp.mean(likelihood[jnp.arange(B), batch["label"]])

    params = {
        "first": {"kernel": shape(3, 3, 3, 8), "bias": shape(8)},
        "second": {"kernel": shape(3, 3, 8, 16), "bias": shape(16)},
        "head": shape(16, 10),
    }
    return Model(loss, params, {"image": shape(B, 8, 8, 3), "label": ids(B)})


def residual(unrolled: bool, layers: int = 4) -> Model:
    """Layers of two matrices each, which compile soon."""

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        x = jnp.tanh(batch["x"] @ params["first"])
        if unrolled:
            for p in params["layers"]:
                x, _ = layer(x, p)
        else:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean((x @ params["last"] - batch["y"]) ** 2)

    lead = () if unrolled else (layers,)
    one = {"up": shape(*lead, W, F), "down": shape(*lead, F, W)}
    params = {
        "first": shape(W, W),
        "layers": [one] * layers if unrolled else one,
        "last": shape(W, W),
    }
    return Model(loss, params, {"x": shape(B, W), "y": shape(B, W)})


MODELS: Mapping[str, Callable[[], Model]] = {
    "mlp": mlp,
    "mixed": mixed,
    "masked": masked,
    "contrastive": contrastive,
    "gpt_scan": gpt_scan,
    "gpt_two_layers": partial(gpt_scan, 2),
    "gpt_unrolled": gpt_unrolled,
    "residual": partial(residual, False),
    "residual_unrolled": partial(residual, True),
    "llama": llama,
    "convnet": convnet,
    "uneven": uneven,
}
