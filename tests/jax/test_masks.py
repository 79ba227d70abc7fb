# mypy: disable-error-code="no-any-return"
"""Infinities, no-numbers and zeros with a sign in losses of JAX, as masks and bounds have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of

INF, LENGTH, WIDTH = jnp.inf, 8, 16
HIDDEN = np.triu(np.full((LENGTH, LENGTH), -np.inf, "float32"), 1)
NOWHERE = np.where(HIDDEN < 0, np.nan, HIDDEN)


def bounded(x: Any) -> Any:
    """One over a zero, as large as scores are."""
    return jnp.clip(1 / x, -0.5, 0.5)


WAYS: Mapping[str, Callable[[Any, Any], Any]] = {
    "where": lambda s, m: jnp.where(m, s, -INF) - jnp.eye(LENGTH),
    "lowest": lambda s, m: jnp.where(m, s, jnp.finfo(s.dtype).min) - jnp.eye(LENGTH),
    "added": lambda s, m: s + jnp.where(m, jnp.eye(LENGTH), -INF),
    "full triu": lambda s, m: s * 2 + jnp.triu(jnp.full(m.shape, -INF), 1),
    "an array": lambda s, m: s * 2 + jnp.asarray(HIDDEN),
    "bounds": lambda s, m: jnp.clip(jnp.maximum(jnp.where(m, s, -INF), -1e30), -INF, 5.0),
    "reduce from -inf": lambda s, m: (
        jnp.where(m, s, -INF)
        - lax.stop_gradient(lax.reduce(jnp.where(m, s, -INF), -INF, lax.max, (2,)))[..., None]
    ),
    "initial": lambda s, m: (
        jnp.where(m, s, -INF) - jnp.max(s, axis=-1, keepdims=True, where=m, initial=-INF)
    ),
    "a sum of exponentials": lambda s, m: (
        jnp.where(m, s, -INF)
        - 2 * jax.nn.logsumexp(jnp.where(m, s, -INF), -1, keepdims=True)
    ),
    "no numbers": lambda s, m: jnp.where(jnp.isnan(jnp.where(m, s, jnp.nan)), -1e9, s),
    "an array of no numbers": lambda s, m: jnp.where(jnp.isnan(jnp.asarray(NOWHERE)), -INF, s * 2),
    "padded": lambda s, m: (
        jnp.where(m, s, -INF)
        + jnp.maximum(jnp.pad(jnp.ones((8, 6)), ((0, 0), (1, 1)), constant_values=-INF), -1.0)
    ),
    "minus zero": lambda s, m: jnp.where(m, s, -9.0) + bounded(jnp.full((8,), -0.0)) * m,
    "zeros of both signs": lambda s, m: (
        jnp.where(m, s, -9.0) + bounded(jnp.asarray(np.array([0.0, -0.0] * 4, "float32")))
    ),
    "padded with minus zero": lambda s, m: (
        jnp.where(m, s, -9.0)
        + bounded(jnp.pad(jnp.ones((8, 6)), ((0, 0), (1, 1)), constant_values=-0.0))
    ),
    "an infinite difference": lambda s, m: jnp.where(m, s, -9.0) + jnp.exp(s - INF),
}  # fmt: skip
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "data": {"dp_replicate": "8"},
    "tensors": {"dp_shard": "4", "tp": "2"},
}


TOGETHER = 4
"""Ways of one program, which compiles once for all of them."""


def model(ways: Sequence[str]) -> models.Model:
    """Attention in each way, with parameters of its own."""

    def attended(own: Any, x: Any, way: str) -> Any:
        q, k, v = (x @ own[name] for name in "qkv")
        scores = jnp.einsum("bqd,bkd->bqk", q, k) * 0.25
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        weights = jax.nn.softmax(WAYS[way](scores, seen), -1)
        return jnp.mean((jnp.einsum("bqk,bkd->bqd", weights, v) @ own["o"]) ** 2)

    def loss(params: Any, batch: Any) -> Any:
        return sum(attended(params[way], batch["x"], way) for way in ways)

    shapes = {way: {name: models.shape(WIDTH, WIDTH) for name in "qkvo"} for way in ways}
    return models.Model(loss, shapes, {"x": models.shape(8, LENGTH, WIDTH)})


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("first", range(0, len(WAYS), TOGETHER))
def test_a_loss_has_its_numbers(first: int, how: str) -> None:
    ways = list(WAYS)[first : first + TOGETHER]
    errors, _ = made_of(f"{ways} {how}", model(ways), dict(LAYOUTS[how])).exact()
    assert errors.largest <= TOLERANCE
