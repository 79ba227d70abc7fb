"""Models of `benchmarks.jax_memory` in JAX, from small ones to Llama 3 8B, never allocated.

Each is a loss function over a tree of arrays, as a user writes it: layers in `jax.lax.scan` or in a
Python loop, attention as products and a softmax, the loss by `jax.nn.logsumexp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import autopar

Tree = Any
Batch = Mapping[str, Any]


def workload(
    loss: Callable[[Tree, Batch], Any],
    params: Tree,
    batch: Mapping[str, tuple[tuple[int, ...], str]],
    precision: str,
) -> autopar.Workload:
    """Nothing is made of it but shapes."""
    return autopar.Workload(
        loss=loss,
        init=lambda key: jax.tree.map(
            lambda size: jnp.zeros(size, jnp.float32),
            params,
            is_leaf=lambda x: isinstance(x, tuple),
        ),
        batch=lambda step=0: {n: jax.ShapeDtypeStruct(s, d) for n, (s, d) in batch.items()},
        optimizer="adamw",
        precision=precision,
    )


def tokens(samples: int, length: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: ((samples, length), "int32") for name in ("tokens", "labels")}


def token_loss(logits: Any, labels: Any) -> Any:
    """The mean cross-entropy of logits [b, s, v]."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def linear(p: Tree, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def affine(k: int, n: int, *lead: int) -> dict[str, tuple[int, ...]]:
    return {"w": (*lead, k, n), "b": (*lead, n)}


def layer_norm(p: Tree, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)
    return y * p["w"] + p["b"]


def rms_norm(weight: Any, x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """[b, s, h, d] -> [b, s, h * d]; keys and values may have fewer heads."""
    b, s, h, d = q.shape
    q = q.reshape(b, s, k.shape[2], -1, d)
    scores = jnp.einsum("bsgrd,btgd->bgrst", q, k) / math.sqrt(d)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bgrst,btgd->bsgrd", jax.nn.softmax(scores, axis=-1), v)
    return mixed.reshape(b, s, h * d)


def transformer_block(heads: int, causal: bool) -> Callable[[Tree, Any], Any]:
    """LayerNorm, attention with biases, a GELU between two products."""

    def block(p: Tree, x: Any) -> Any:
        b, s, w = x.shape
        h = layer_norm(p["norm1"], x)
        q, k, v = (linear(p[n], h).reshape(b, s, heads, w // heads) for n in ("q", "k", "v"))
        x = x + linear(p["out"], attention(q, k, v, causal))
        return x + linear(p["down"], jax.nn.gelu(linear(p["up"], layer_norm(p["norm2"], x))))

    return block


def transformer_layer(width: int, *lead: int) -> Tree:
    return {
        **{n: affine(width, width, *lead) for n in ("q", "k", "v", "out")},
        "norm1": {"w": (*lead, width), "b": (*lead, width)},
        "norm2": {"w": (*lead, width), "b": (*lead, width)},
        "up": affine(width, 4 * width, *lead),
        "down": affine(4 * width, width, *lead),
    }


def gpt(
    layers: int, width: int, heads: int, vocabulary: int, samples: int, length: int,
    precision: str = "float32", scan: bool = True,
) -> autopar.Workload:  # fmt: skip
    block = transformer_block(heads, causal=True)

    def loss(params: Tree, batch: Batch) -> Any:
        x = params["embed"][batch["tokens"]] + params["positions"]
        if scan:
            x = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])[0]
        else:
            for p in params["blocks"]:
                x = block(p, x)
        return token_loss(layer_norm(params["norm"], x) @ params["head"], batch["labels"])

    params = {
        "embed": (vocabulary, width),
        "positions": (length, width),
        "blocks": transformer_layer(width, layers)
        if scan
        else [transformer_layer(width) for _ in range(layers)],
        "norm": {"w": (width,), "b": (width,)},
        "head": (width, vocabulary),
    }
    return workload(loss, params, tokens(samples, length), precision)


def vit(
    layers: int, width: int, heads: int, samples: int, precision: str = "float32"
) -> autopar.Workload:
    """16 x 16 patches of 224 x 224 images; layers in a Python loop."""
    block = transformer_block(heads, causal=False)

    def loss(params: Tree, batch: Batch) -> Any:
        x = linear(params["patch"], batch["patches"]) + params["positions"]
        for p in params["blocks"]:
            x = block(p, x)
        logits = linear(params["head"], layer_norm(params["norm"], x).mean(1))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=-1)
        return -picked.mean()

    params = {
        "patch": affine(768, width),
        "positions": (196, width),
        "blocks": [transformer_layer(width) for _ in range(layers)],
        "norm": {"w": (width,), "b": (width,)},
        "head": affine(width, 1000),
    }
    batch = {"patches": ((samples, 196, 768), "float32"), "label": ((samples,), "int32")}
    return workload(loss, params, batch, precision)


def rotary(x: Any) -> Any:
    """[b, s, h, d], pairs (i, i + d/2)."""
    s, d = x.shape[1], x.shape[3]
    angle = jnp.arange(s)[:, None] / 500000.0 ** (jnp.arange(d // 2) * 2 / d)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def feed_forward(p: Tree, h: Any) -> Any:
    return (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def dropless(p: Tree, h: Any, router: Any) -> Any:
    """Two experts for each token, rows in the order of their experts (`layers/moe.py` of MaxText).
    ``router`` [width, experts]."""
    x = h.reshape(-1, h.shape[-1])
    weights, chosen = jax.lax.top_k(x @ router, 2)
    flat = jnp.ravel(chosen)
    order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=router.shape[1])
    rows = jnp.take(x, order // 2, axis=0)
    gate, up = (jax.lax.ragged_dot(rows, p[n], sizes) for n in ("gate", "up"))
    made = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
    made = jnp.take(made, jnp.argsort(order), axis=0).reshape(*chosen.shape, -1)
    return jnp.einsum("tkm,tk->tm", made, jax.nn.softmax(weights)).reshape(h.shape)


def llama(
    layers: int, width: int, heads: int, groups: int, hidden: int, vocabulary: int, samples: int,
    length: int, precision: str = "float32", written_out: bool = False, experts: int = 0,
) -> autopar.Workload:  # fmt: skip
    """Layers in a scan; ``written_out``: a list of them, in a Python loop. ``experts``: of a layer,
    two of which each token has."""

    def block(x: Any, p: Tree) -> tuple[Any, None]:
        b, s, _ = x.shape
        h = rms_norm(p["norm1"], x)
        q = rotary((h @ p["q"]).reshape(b, s, heads, -1))
        k = rotary((h @ p["k"]).reshape(b, s, groups, -1))
        v = (h @ p["v"]).reshape(b, s, groups, -1)
        x = x + attention(q, k, v, causal=True) @ p["o"]
        h = rms_norm(p["norm2"], x)
        return x + (dropless(p, h, p["router"]) if experts else feed_forward(p, h)), None

    def loss(params: Tree, batch: Batch) -> Any:
        x = params["embed"][batch["tokens"]]
        if written_out:
            for p in params["layers"]:
                x, _ = block(x, p)
        else:
            x, _ = jax.lax.scan(block, x, params["layers"])
        return token_loss(rms_norm(params["norm"], x) @ params["head"], batch["labels"])

    kv, each = groups * width // heads, (experts,) if experts else ()
    layer = {
        "norm1": (layers, width),
        "q": (layers, width, width),
        "k": (layers, width, kv),
        "v": (layers, width, kv),
        "o": (layers, width, width),
        "norm2": (layers, width),
        **({"router": (layers, width, experts)} if experts else {}),
        "gate": (layers, *each, width, hidden),
        "up": (layers, *each, width, hidden),
        "down": (layers, *each, hidden, width),
    }
    params = {
        "embed": (vocabulary, width),
        "layers": [{n: s[1:] for n, s in layer.items()}] * layers if written_out else layer,
        "norm": (width,),
        "head": (width, vocabulary),
    }
    return workload(loss, params, tokens(samples, length), precision)


def mlp(layers: int, width: int, samples: int, precision: str = "float32") -> autopar.Workload:
    def loss(params: Tree, batch: Batch) -> Any:
        x = batch["x"]
        for p in params["blocks"]:
            x = x + linear(p["down"], jax.nn.relu(linear(p["up"], x)))
        return jnp.mean((x - batch["y"]) ** 2)

    params = {
        "blocks": [
            {"up": affine(width, 4 * width), "down": affine(4 * width, width)}
            for _ in range(layers)
        ]
    }
    batch = {name: ((samples, width), "float32") for name in ("x", "y")}
    return workload(loss, params, batch, precision)


def llama3_8b(
    samples: int, length: int, precision: str = "float32", written_out: bool = False
) -> autopar.Workload:
    """Llama Team (2024), "The Llama 3 Herd of Models", table 3."""
    return llama(32, 4096, 32, 8, 14336, 128256, samples, length, precision, written_out)


def llama3_405b(
    samples: int, length: int, precision: str = "float32", written_out: bool = False
) -> autopar.Workload:
    """The same table."""
    return llama(126, 16384, 128, 8, 53248, 128256, samples, length, precision, written_out)
