"""Whole numbers keep the dtype in which they were captured where 64 bits are allowed, as in
`verify`: what they are written into takes no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of
from tests.jax.test_capture import equal


def counting() -> models.Model:
    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        tokens = batch["tokens"]
        logits = params["embed"][tokens] @ params["head"]
        best = jnp.argmax(logits, -1).astype(jnp.int32)
        table = jnp.zeros((tokens.shape[0], 3), jnp.int32)
        for place, column in enumerate(
            (
                jnp.sum(best, 1, dtype=jnp.int32),
                jnp.cumsum(tokens, 1, dtype=jnp.int32)[:, -1],
                jnp.sum(logits[..., 0] > 0, 1, dtype=jnp.int32),
            )
        ):
            table = lax.dynamic_update_slice(table, column[:, None], (0, place))
        return jnp.mean(jnp.mean(logits**2, (1, 2)) * jnp.tanh(table.sum(1) * 0.01))

    v, w = models.V, models.W
    params = {"embed": models.shape(v, w), "head": models.shape(w, v)}
    return models.Model(loss, params, models.TOKENS)


def test_they_are_as_wide_as_they_were() -> None:
    program = made_of("counting", counting(), {"dp_shard": "8"}, optimizer="adamw")
    assert program.exact()[0].largest <= TOLERANCE


def in_bits() -> models.Model:
    """What joins or turns bits of whole numbers, as truth values it would be another function."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        tokens = batch["tokens"] & 31
        turned = ~tokens & 63
        joined = lax.reduce_or(tokens, (1,)) + lax.reduce_and(tokens | 16, (1,))
        weight = turned + joined[:, None] + ~jnp.int32(-8)
        logits = params["embed"][tokens] @ params["head"]
        return jnp.mean(jnp.square(logits) * jnp.where(~(tokens > 3), weight, 1)[..., None])

    v, w = models.V, models.W
    params = {"embed": models.shape(v, w), "head": models.shape(w, v)}
    return models.Model(loss, params, {"tokens": models.TOKENS["tokens"]})


def test_bits_are_no_truth_values() -> None:
    program = made_of("in bits", in_bits(), {"dp_shard": "4", "tp": "2"})
    assert program.exact()[0].largest <= TOLERANCE
    equal(in_bits().loss, in_bits().params, in_bits().batch)


def hashed() -> models.Model:
    """Places in a table by a hash in 32 bits without a sign, as hash grids and embeddings have."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        ids = batch["tokens"].astype(jnp.uint32)
        mixed = (ids * jnp.uint32(2654435761)) ^ (ids << 3)
        mixed = jnp.where(ids > jnp.uint32(3000000000), jnp.uint32(4294967295), mixed)
        mixed = jnp.maximum(mixed % jnp.uint32(4000000000), jnp.uint32(7))
        places = (mixed % jnp.uint32(models.V)).astype(jnp.int32)
        return jnp.mean(jnp.square(params["embed"][places] @ params["head"]))

    v, w = models.V, models.W
    params = {"embed": models.shape(v, w), "head": models.shape(w, v)}
    return models.Model(loss, params, models.TOKENS)


def test_large_ones_say_their_dtype() -> None:
    program = made_of("hashed", hashed(), {"dp_shard": "4", "tp": "2"})
    assert "jnp.uint32(2654435761)" in program.text
    assert program.exact()[0].largest <= TOLERANCE


def test_numbers_that_are_joined_are_those_of_arrays() -> None:
    """Integers that begin anew, and a root of a negative one, which Python has otherwise."""

    def loss(params: Any, batch: Mapping[str, Any]) -> Any:
        count = jax.jit(lambda a: a * a + a)(jnp.int32(70_000)) % 5
        root = jax.jit(lambda a: a**0.5)(jnp.float32(-2.0))
        return jnp.mean(batch["x"] * params["w"] * count * jnp.nan_to_num(root, nan=3.0))

    equal(loss, {"w": models.shape(8)}, {"x": models.shape(4, 8)})
