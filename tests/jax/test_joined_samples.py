# mypy: disable-error-code="no-any-return"
"""Parts of a batch that a loss joins: devices have whole samples of what is joined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontends.jax import capture
from autopar.frontends.jax.inputs import abstract_batch
from autopar.nouns.batch import sample_dims
from autopar.rules.batch import batch_flow
from tests.jax import models
from tests.plans import cluster

B, V = 8, 16
PARAMS = {"table": models.shape(V, 8), "head": models.shape(8, V)}
BATCH = {"better": models.ids(B, 6), "worse": models.ids(B, 6)}


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def preferred(params: Any, batch: Any) -> Any:
    both = jnp.concatenate([batch["better"], batch["worse"]])
    scores = jnp.tanh(params["table"][both]) @ params["head"]
    each = jax.nn.log_softmax(scores)[..., 0].sum(-1)
    better, worse = jnp.split(each, 2)
    return -jax.nn.log_sigmoid(better - each[B:]).mean() + 0.1 * jnp.mean(worse**2)


def test_devices_and_microbatches_have_whole_samples(tmp_path: Path) -> None:
    given, params = models.concrete(BATCH, "float64"), models.concrete(PARAMS, "float64", seed=5)
    fix = {"dp_shard": "2", "zero": "3", "microbatch": "2"}
    plan = autopar.plan(
        preferred, given, cluster(2), fix, tmp_path, params=params, precision="float64"
    )
    trainer = autopar.load(plan, model=preferred, params=params)
    value, gradients = jax.jit(jax.value_and_grad(preferred))(params, given)
    ours, grads = trainer.value_and_grad(given)
    assert float(ours) == pytest.approx(float(value), rel=1e-13)
    for key, wanted in gradients.items():
        np.testing.assert_allclose(grads[key], wanted, rtol=1e-10, atol=1e-14)


def test_what_a_loss_returns_beside_keeps_its_order() -> None:
    def beside(params: Any, batch: Any) -> Any:
        both = jnp.concatenate([batch["better"], batch["worse"]])
        scores = (params["table"][both] @ params["head"]).mean((1, 2))
        return jnp.square(scores).mean(), scores

    captured = capture(beside, PARAMS, abstract_batch(BATCH), has_aux=True)
    assert batch_flow(captured.graph, sample_dims(captured.batch)).obstacles
    assert "cat" in {op.kind for op in captured.graph.ops}
