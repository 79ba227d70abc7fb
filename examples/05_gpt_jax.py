"""05: the GPT of example 02 in JAX: a pure function from parameters and a batch to the loss.

    autopar plan examples/05_gpt_jax.py --cluster local -o plan
    autopar run plan --steps 20
    autopar verify plan

Parameters carry the names and shapes that the PyTorch model gives them, those of the layers stacked
along a first dim for `jax.lax.scan`: both frameworks can hold the same weights.
"""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

VOCABULARY = 256  # a token is a byte
WIDTH, HEADS, LAYERS = 128, 4, 4
BATCH, LENGTH = 16, 128

Params = dict[str, Any]  # nested: {"head": {"weight": array}, "blocks": {"up": {...}, ...}, ...}


@functools.cache
def text() -> bytes:
    """The modules at the top of the standard library, one after the other: about 7 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))


def batch(step: int = 0) -> dict[str, np.ndarray]:
    """Global batch number ``step``: BATCH places in the text; targets are one byte further on."""
    places = random.Random(step)
    starts = [places.randrange(len(text()) - LENGTH) for _ in range(BATCH)]
    rows = np.array([list(text()[start : start + LENGTH + 1]) for start in starts], np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def init(key: jax.Array) -> Params:
    """Fresh parameters; matrices are [out, in], those in "blocks" have a first dim of LAYERS."""
    keys = iter(jax.random.split(key, 16))

    def matrix(*shape: int, bias: bool = False) -> Params:
        weight = jax.random.normal(next(keys), shape) * 0.02
        return {"weight": weight, "bias": jnp.zeros(shape[:-1])} if bias else {"weight": weight}

    def norm(*shape: int) -> Params:
        return {"weight": jnp.ones(shape), "bias": jnp.zeros(shape)}

    return {
        "tokens": matrix(VOCABULARY, WIDTH),
        "positions": matrix(LENGTH, WIDTH),
        "blocks": {
            "attention_norm": norm(LAYERS, WIDTH),
            "attention": {
                name: matrix(LAYERS, WIDTH, WIDTH, bias=True) for name in ("q", "k", "v", "out")
            },
            "mlp_norm": norm(LAYERS, WIDTH),
            "up": matrix(LAYERS, 4 * WIDTH, WIDTH, bias=True),
            "down": matrix(LAYERS, WIDTH, 4 * WIDTH, bias=True),
        },
        "norm": norm(WIDTH),
        "head": matrix(VOCABULARY, WIDTH),
    }


def linear(p: Params, x: jax.Array) -> jax.Array:
    """[b, s, k] -> [b, s, n], with p["weight"] [n, k]."""
    y = jnp.einsum("bsk,nk->bsn", x, p["weight"])
    return y + p["bias"] if "bias" in p else y


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["weight"] + p["bias"]


def attention(p: Params, x: jax.Array) -> jax.Array:
    """Causal self-attention: [b, s, WIDTH] -> [b, s, WIDTH]."""
    b, s, _ = x.shape
    q, k, v = (linear(p[name], x).reshape(b, s, HEADS, -1) for name in ("q", "k", "v"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(p["out"], mixed.reshape(b, s, WIDTH))


def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
    """One layer: attention, then a wide MLP, each added to what it read."""
    x = x + attention(p["attention"], layer_norm(p["attention_norm"], x))
    h = jax.nn.gelu(linear(p["up"], layer_norm(p["mlp_norm"], x)), approximate=False)
    return x + linear(p["down"], h), None


def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of the next byte."""
    tokens, targets = batch["tokens"], batch["targets"]
    places = jnp.arange(tokens.shape[1])
    x = params["tokens"]["weight"][tokens] + params["positions"]["weight"][places]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = linear(params["head"], layer_norm(params["norm"], x))
    likelihood = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(likelihood, targets[..., None], axis=-1).mean()


workload = autopar.Workload(loss=loss, init=init, batch=batch, optimizer="adamw")
