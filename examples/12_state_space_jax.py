"""12: a language model without attention, in JAX: gated linear recurrences by an associative scan.

    autopar plan examples/12_state_space_jax.py --cluster local -o plan
    autopar run plan --steps 20
    autopar verify plan

The layer is the RG-LRU of Griffin (De et al. 2024, arXiv:2402.19427, equations 1 to 4): a state of
WIDTH numbers that each token forgets and writes by gates of its own. Time is one associative scan,
so it stays whole on a device; samples and the width are what plans split.
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
WIDTH, LAYERS = 128, 3
BATCH, LENGTH = 16, 128
SHARPNESS = 8.0  # c of equation 3: how far one gate moves the memory

Params = dict[str, Any]


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
    """Fresh parameters, those of the layers in a list."""
    keys = iter(jax.random.split(key, 8 * LAYERS + 2))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def layer() -> Params:
        return {
            "norm": jnp.ones(WIDTH),
            "values": matrix(WIDTH, WIDTH),
            "write": matrix(WIDTH, WIDTH),
            "forget": matrix(WIDTH, WIDTH),
            # a^c is spread between 0.9 and 0.999, as in the paper
            "memory": jnp.log(jnp.expm1(-jnp.log(jnp.linspace(0.9, 0.999, WIDTH)) / SHARPNESS)),
            "out": matrix(WIDTH, WIDTH),
            "mlp_norm": jnp.ones(WIDTH),
            "gate": matrix(WIDTH, 2 * WIDTH),
            "up": matrix(WIDTH, 2 * WIDTH),
            "down": matrix(2 * WIDTH, WIDTH),
        }

    return {
        "embedding": matrix(VOCABULARY, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": jnp.ones(WIDTH),
        "head": matrix(WIDTH, VOCABULARY),
    }


def rms_norm(weight: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def recurrence(p: Params, x: jax.Array) -> jax.Array:
    """[b, s, WIDTH] -> [b, s, WIDTH]: h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (write gate) v_t."""
    log_a = -SHARPNESS * jax.nn.softplus(p["memory"]) * jax.nn.sigmoid(x @ p["forget"])
    fresh = jnp.sqrt(-jnp.expm1(2 * log_a)) * jax.nn.sigmoid(x @ p["write"]) * (x @ p["values"])

    def then(first: Any, second: Any) -> Any:
        (a, h), (b, g) = first, second
        return a * b, b * h + g

    _, states = jax.lax.associative_scan(then, (jnp.exp(log_a), fresh), axis=1)
    return states


def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of the next byte."""
    x = params["embedding"][batch["tokens"]]
    for p in params["layers"]:
        x = x + recurrence(p, rms_norm(p["norm"], x)) @ p["out"]
        h = rms_norm(p["mlp_norm"], x)
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    likelihood = jax.nn.log_softmax(rms_norm(params["norm"], x) @ params["head"])
    return -jnp.take_along_axis(likelihood, batch["targets"][..., None], axis=-1).mean()


workload = autopar.Workload(loss=loss, init=init, batch=batch, optimizer="adamw", clip_norm=1.0)
