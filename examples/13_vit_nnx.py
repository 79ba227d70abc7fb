"""13: a vision transformer of Flax NNX, whose modules are objects. Install flax first.

    autopar plan examples/13_vit_nnx.py --cluster local -o plan
    autopar run plan --steps 20
    autopar verify plan

`nnx.split` takes a model apart into its graph, its parameters (`nnx.Param`) and all else. Plans are
of a function from parameters and a batch to the loss; `nnx.merge` puts the model together in it.
Pictures are rings of noise: the class says how far out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import autopar

SIZE, PATCH, CLASSES = 32, 4, 8
WIDTH, HEADS, LAYERS = 64, 4, 4
BATCH = 32


def batch(step: int = 0) -> dict[str, np.ndarray]:
    """Global batch number ``step``: pictures [BATCH, SIZE, SIZE, 1] and their classes."""
    draws = np.random.default_rng(step)
    label = draws.integers(0, CLASSES, BATCH, np.int32)
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    ring = np.abs(np.hypot(x, y)[None] - 2 * label[:, None, None]) < 1.5
    noise = draws.standard_normal((BATCH, SIZE, SIZE))
    return {"image": (noise * 0.3 + ring)[..., None].astype(np.float32), "label": label}


class Encoder(nnx.Module):
    """A layer of Dosovitskiy et al. 2021 ("An image is worth 16x16 words"), equations 2 and 3."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), deterministic=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class VisionTransformer(nnx.Module):
    """Patches, LAYERS layers, and the mean of all tokens as what the class is read from."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        patches = (SIZE // PATCH) ** 2
        size = (PATCH, PATCH)
        self.embed = nnx.Conv(1, WIDTH, size, strides=size, padding="VALID", rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (patches, WIDTH)))
        self.layers = nnx.List([Encoder(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.embed(image).reshape(len(image), -1, WIDTH) + self.positions[...]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(axis=1))


def init(key: jax.Array) -> Any:
    """Fresh parameters as plain dicts."""
    return nnx.to_pure_dict(nnx.state(VisionTransformer(nnx.Rngs(key)), nnx.Param))


GRAPH, STATE, REST = nnx.split(VisionTransformer(nnx.Rngs(0)), nnx.Param, ...)


def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of a batch."""
    state = nnx.State(STATE)
    nnx.replace_by_pure_dict(state, params)
    logits = nnx.merge(GRAPH, state, REST)(batch["image"])
    likely = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(likely, batch["label"][:, None], axis=-1))


vit = autopar.Workload(loss=loss, init=init, batch=batch, clip_norm=1.0)
