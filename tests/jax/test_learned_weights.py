# mypy: disable-error-code="no-any-return"
"""Losses weighted by parameters, and what is added to them, by any layout those of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.nouns.layout import LayoutError
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of

LAYOUTS: dict[str, dict[str, str]] = {
    "microbatches": {"dp_replicate": "4", "tp": "2", "zero": "0", "microbatch": "2"},
    "ZeRO 1": {"dp_shard": "4", "tp": "2", "zero": "1", "microbatch": "1"},
    "ZeRO 2": {"dp_replicate": "2", "dp_shard": "4", "zero": "2", "microbatch": "1"},
    "ZeRO 3": {"dp_shard": "4", "tp": "2", "zero": "3", "microbatch": "2"},
    "stages": {"pp": "2", "dp_shard": "4", "zero": "2", "schedule": "1f1b", "microbatch": "1"},
}


def model(weighted: Callable[[Any, Any, Any], Any]) -> models.Model:
    """Two tasks of a trunk of layers; ``weighted`` makes a loss of the parameters and theirs."""
    trunk = models.residual(unrolled=True)

    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params["first"])
        for p in params["layers"]:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        near = jnp.mean((x @ params["last"] - batch["y"]) ** 2)
        return weighted(params, near, jnp.mean(jnp.abs(x)))

    params = {**trunk.params, "s": models.shape(2), "t": models.shape(), "rho": models.shape(2)}
    batch = {name: models.shape(16, models.W) for name in trunk.batch}
    return replace(trunk, loss=loss, params=params, batch=batch)


def learned(params: Any, near: Any, far: Any) -> Any:
    """Uncertainty (Kendall et al. 2018), a temperature, a balance and a penalty."""
    s, t = params["s"], params["t"]
    first = jnp.exp(-s[0]) * near + s[0]
    tasks = jnp.stack([near, far]) * jax.nn.softmax(params["rho"]) * jnp.array([0.5, 2.0])
    penalty = 0.1 * sum((p["up"] ** 2).sum() for p in params["layers"])
    whole = first + far * jnp.exp(-s[1]) + s[1] + (near + far) / (1 + t**2) + t
    return whole + tasks.sum() + penalty, {"weighted": first}


@pytest.mark.parametrize("name", ["ZeRO 1", "stages"])
def test_a_loss_that_no_sample_is_in_counts_once(name: str) -> None:
    """Each rank and microbatch gives a share of it."""
    made = model(lambda params, near, far: (params["s"] ** 2).sum() + jnp.exp(params["t"]))
    errors, _ = made_of("of no sample", made, LAYOUTS[name]).exact()
    assert errors.largest <= TOLERANCE


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.some(2)
def test_loss_and_gradients_are_those_of_one_device(name: str) -> None:
    program = made_of("learned weights", model(learned), LAYOUTS[name], has_aux=True)
    assert program.plan.microbatches > 1
    errors, moved = program.exact()
    assert errors.output is not None
    assert errors.largest < TOLERANCE, errors
    bare = [replace(row, what="") for row in moved]
    assert not differences(program.priced_in_float64(), bare)


@pytest.mark.parametrize(
    "weighted",
    [
        lambda p, near, far: near * far * p["t"],
        lambda p, near, far: (near * p["t"]) ** 2,
        lambda p, near, far: jnp.exp(near / p["t"]),
        lambda p, near, far: near * jax.lax.stop_gradient(far),
        lambda p, near, far: p["t"] * near / far,
    ],
)
def test_what_is_not_linear_in_means_is_not_cut_into_microbatches(weighted: Any) -> None:
    fix = {"dp_replicate": "8", "microbatch": "1"}
    with pytest.raises(LayoutError, match="needs the whole of"):
        made_of("refused", model(weighted), fix)
