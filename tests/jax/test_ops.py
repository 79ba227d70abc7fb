"""Ops of programs that split what they sum over, against one device's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.runtime.jax.parallel.ops import cross_entropy


@pytest.mark.parametrize(
    ("zero_outside", "labels"),
    [(False, (0, 9, 4, 5, -1, -10)), (True, (0, 9, -1, 5, 10, -100))],
)
def test_cross_entropy_of_classes_on_two_ranks(zero_outside: bool, labels: tuple[int, ...]) -> None:
    given = np.random.default_rng(0).normal(size=(6, 10)).astype(np.float32)
    places = jnp.array(labels)

    def plain(logits: Any) -> Any:
        likelihood = jax.nn.log_softmax(logits)
        if zero_outside:
            return -(jax.nn.one_hot(places, 10) * likelihood).sum()
        return -likelihood[jnp.arange(6), places].sum()

    def on_two(logits: Any) -> Any:
        def share(piece: Any) -> Any:
            return cross_entropy(piece, places, axis="tp", zero_outside=zero_outside)

        pieces = jnp.stack(jnp.split(logits, 2, axis=1))
        return jax.vmap(share, axis_name="tp")(pieces).mean()

    def on_one(logits: Any) -> Any:
        return cross_entropy(logits, places, zero_outside=zero_outside)

    right, slopes = jax.value_and_grad(plain)(given)
    for function in (on_one, on_two):
        assert function(given) == pytest.approx(float(right), rel=1e-6)
    np.testing.assert_allclose(jax.grad(on_one)(given), slopes, atol=1e-6)
    np.testing.assert_allclose(jax.grad(on_two)(given), slopes, atol=1e-6)
