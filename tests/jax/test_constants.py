"""Arrays that a loss closes over are frozen tensors of the model, not text of its program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontends.jax.capture import capture
from autopar.runtime.jax.programs import step_alone
from autopar.runtime.shared.settings import changed_training
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.verified import TOLERANCE
from tests.jax import models
from tests.jax.planned import made_of

D, R, ROWS = 256, 8, 16


def lora(base: Mapping[str, Any]) -> models.Model:
    """A low-rank addition to a frozen layer, a frozen bias in bfloat16, and a table of integers."""

    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"] @ base["w"] + (batch["x"] @ params["a"]) @ params["b"]
        h = jnp.tanh(h + base["bias"].astype(h.dtype))
        return jnp.mean((h * base["order"] - batch["y"]) ** 2)

    params = {"a": models.shape(D, R), "b": models.shape(R, D)}
    return models.Model(loss, params, {"x": models.shape(ROWS, D), "y": models.shape(ROWS, D)})


def arrays(seed: int = 0) -> dict[str, Any]:
    draws = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(draws.normal(size=(D, D)) / 16, "float32"),
        "bias": jnp.asarray(draws.normal(size=D), "bfloat16"),
        "order": np.asarray(draws.integers(-3, 3, D), "int32"),
    }


LAYOUTS: dict[str, dict[str, str]] = {
    "dp": {"dp_replicate": "8"},
    "tp": {"dp_shard": "2", "tp": "4", "zero": "1"},
    "zero 3": {"dp_shard": "8", "zero": "3"},
}


@pytest.mark.parametrize("how", LAYOUTS)
def test_frozen_base(how: str) -> None:
    held = arrays()
    program = made_of(f"lora {how}", lora(held), LAYOUTS[how])
    assert set(program.captured.constants) == {
        "constants.base.w",
        "constants.base.bias",
        "constants.base.order",
    }
    assert len(program.text) < 6000
    errors, moved = program.exact()
    assert errors.largest <= TOLERANCE
    assert differences(program.priced_in_float64(), moved) == []


def test_frozen_arrays_have_no_optimizer_state_and_stay_as_they_are() -> None:
    held = arrays()
    program = made_of("lora", lora(held), LAYOUTS["zero 3"], optimizer="adamw")
    step = step_alone(program.program(), program.workload)
    tree = program.workload.init(None)  # type: ignore[misc]
    state = step.initial(lambda own: own.gather_names(tree), program.captured.constants)
    assert set(state["params"]) == set(state["m"]) == {"a", "b"}
    before = np.asarray(held["w"])
    w = state["frozen"]["constants.base.w"]
    assert w.addressable_shards[0].data.size * 8 == w.size
    state, _, _ = step.step(state, step.cut(program.workload.batch(0)))
    np.testing.assert_array_equal(np.asarray(state["frozen"]["constants.base.w"]), before)
    assert state["frozen"]["constants.base.bias"].dtype == jnp.bfloat16
    assert state["frozen"]["constants.base.order"].dtype == jnp.int32


def test_changed_constant_is_told_by_name() -> None:
    program = made_of("lora", lora(arrays()), LAYOUTS["dp"])
    other = {**arrays(), "w": arrays(seed=1)["w"]}
    changed = capture(lora(other).loss, program.workload.init(None), program.workload.batch(0))  # type: ignore[misc]
    assert changed.fingerprint() == program.captured.fingerprint()
    same = changed_training(program.plan, program.workload, program.captured.digests)
    assert same == []
    (note,) = changed_training(program.plan, program.workload, changed.digests)
    assert note.startswith("constants.base.w is ")


def test_stacked_base_is_a_scan_over_layers() -> None:
    base = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32, 32)), "float32")
    table = np.random.default_rng(1).normal(size=(16, 32))  # of float64: JAX rounds it

    def loss(params: Any, batch: Any) -> Any:
        def layer(h: Any, given: Any) -> Any:
            w, a = given
            return jnp.tanh(h @ w * 0.1 + h * a + table), None

        h, _ = jax.lax.scan(layer, batch["x"], (base, params["a"]))
        return jnp.mean((h - batch["y"]) ** 2)

    batch = {"x": models.shape(8, 16, 32), "y": models.shape(8, 16, 32)}
    model = models.Model(loss, {"a": models.shape(3, 32)}, batch)
    program = made_of("stacked", model, {"dp_shard": "8", "zero": "3"})
    assert len(program.captured.constants) == 4
    assert program.captured.graph.blocks
    errors, _ = program.exact()
    assert errors.largest <= TOLERANCE
