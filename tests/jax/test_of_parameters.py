# mypy: disable-error-code="no-any-return"
"""Linear algebra on parameters, of which no rule is known, is computed by each device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.frontends.jax import capture
from autopar.rules.kept_whole import MARK
from autopar.rules.registry import UnruledOp, register, unregister
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of

B, W, LAYERS = 16, 8, 2
Weight = Callable[[Any], Any]


def near_one(w: Any) -> Any:
    return jnp.eye(W) + 0.1 * w


def glow(params: Any, batch: Any) -> Any:
    """Invertible products (Kingma and Dhariwal 2018), whose volumes count once a sample."""
    x, volume = batch["x"], 0.0
    for w in params["w"]:
        x, volume = jnp.tanh(x @ near_one(w)), volume + jnp.linalg.slogdet(near_one(w))[1]
    return jnp.mean((x**2).sum(-1) - volume)


def scanned(params: Any, batch: Any) -> Any:
    def layer(carry: Any, w: Any) -> tuple[Any, None]:
        x, volume = carry
        return (jnp.tanh(x @ near_one(w)), volume + jnp.linalg.slogdet(near_one(w))[1]), None

    (x, volume), _ = jax.lax.scan(layer, (batch["x"], jnp.zeros(B)), params["w"])
    return jnp.mean((x**2).sum(-1) - volume)


def of_each(weight: Weight) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for w in params["w"]:
            x = jnp.tanh(x @ weight(w))
        return jnp.mean(x**2)

    return loss


def cayley(w: Any) -> Any:
    skew = 0.1 * (w - w.T)
    return jnp.linalg.solve(jnp.eye(W) + skew, jnp.eye(W) - skew)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "glow": glow,
    "cayley": of_each(cayley),
    "inverse": of_each(lambda w: jnp.linalg.inv(near_one(w))),
    "determinant": of_each(lambda w: w * jnp.linalg.det(near_one(w))),
}
LAYOUTS: list[dict[str, str]] = [
    {"dp_replicate": "2", "dp_shard": "2", "tp": "2", "zero": "2", "microbatch": "2"},
    {"dp_shard": "8", "zero": "3", "microbatch": "1"},
]
PARAMS = {"w": [models.shape(W, W)] * LAYERS}
BATCH = {"x": models.shape(B, W)}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_one_device(name: str) -> None:
    for fix in LAYOUTS:
        program = made_of(name, models.Model(LOSSES[name], PARAMS, BATCH), fix)
        assert program.plan.microbatches > 1
        errors, _ = program.exact()
        assert errors.largest < TOLERANCE, errors


def test_layers_of_a_scan() -> None:
    params = {"w": models.shape(LAYERS, W, W)}
    fix = {"dp_shard": "4", "tp": "2", "zero": "2"}
    errors, _ = made_of("scanned", models.Model(scanned, params, BATCH), fix).exact()
    assert errors.largest < TOLERANCE, errors


@pytest.mark.parametrize(
    "weight",
    [
        lambda w, x: jnp.linalg.slogdet(w + x.T @ x)[1],
        lambda w, x: jnp.linalg.inv(w + jnp.mean(x)).sum(),
    ],
)
def test_what_samples_have_a_say_in_is_refused(weight: Any) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] @ params["w"][0]) + weight(params["w"][1], batch["x"])

    with pytest.raises(UnruledOp, match=r"no rule says how op 'jax::lu' may be split"):
        made_of("refused", models.Model(loss, PARAMS, BATCH), {"dp_shard": "8"})


def test_a_rule_of_the_user_holds() -> None:
    def marked() -> bool:
        ops = capture(glow, PARAMS, BATCH).graph.ops
        return any(op.attrs.get(MARK) for op in ops if op.kind == "jax::lu")

    assert marked()
    register("jax::lu", "a! b! -> a! b!, a!, a!")
    try:
        assert not marked()
    finally:
        unregister("jax::lu")
