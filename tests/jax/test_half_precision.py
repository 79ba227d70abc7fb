"""Models whose parameters are of half precision train, and are verified."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.nouns.workload import Workload
from autopar.runtime.jax.optimizer import SLOTS, optimizer_step
from autopar.runtime.jax.step import Step
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.jax import verify as jax_verify
from autopar.runtime.verify.verified import TOLERANCE, rounding_of
from tests.jax import models
from tests.jax.planned import made_of


def _workload(**options: Any) -> Workload:
    return Workload(loss=lambda p, b: 0.0, init=lambda k: {}, batch=lambda: {}, **options)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_updates_are_those_of_float64_rounded(optimizer: str, dtype: str) -> None:
    """Each from the same state, so that what is seen is one rounding of what is kept."""
    given = _workload(optimizer=optimizer, learning_rate=0.1, weight_decay=0.1)
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {
        name: {"w": jnp.asarray(np.abs(rng.normal(size=64)) + 0.1, dtype)}
        for name in ("p", "g", *SLOTS[optimizer])
    }
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, "float64"), state)
        for step in (1, 2, 1000):
            updated, exact = (
                optimizer_step(
                    given, jnp.int32(step), s["p"], s["g"], {n: s[n] for n in SLOTS[optimizer]}
                )
                for s in (state, wide)
            )
            pairs = zip(jax.tree.leaves(updated), jax.tree.leaves(exact), strict=True)
            for ours, theirs in pairs:
                assert ours.dtype == dtype
                kept = float(jnp.finfo(dtype).eps)  # and numbers around one are added in float32
                computed = 4 * float(jnp.finfo("float32").eps)
                np.testing.assert_allclose(np.asarray(ours, float), theirs, kept, computed)


def half() -> models.Model:
    """Parameters in bfloat16, a head in float32."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"].astype(jnp.bfloat16)
        h = jax.nn.gelu(x @ params["up"]) @ params["down"]
        return jnp.mean((h.astype(jnp.float32) @ params["head"] - batch["y"]) ** 2)

    low = {"up": (models.W, models.F), "down": (models.F, models.W)}
    params: dict[str, Any] = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in low.items()}
    params["head"] = models.shape(models.W, 8)
    return models.Model(loss, params, {"x": models.shape(8, models.W), "y": models.shape(8, 8)})


def test_parameters_in_bfloat16_train_and_are_verified() -> None:
    program = made_of("half", half(), {"dp_shard": "4", "tp": "2", "zero": "2"}, clip_norm=0.5)
    assert 'dtype="bfloat16"' in program.text
    errors, _ = program.exact()
    assert errors.largest <= TOLERANCE
    step = Step(program.program(), program.workload)
    batches = [dict(program.workload.batch(i)) for i in range(jax_verify.STEPS)]
    function = jax_verify.compiled(step, step.watched, batches[0])
    tree = program.workload.init(None)  # type: ignore[misc]
    with jax.enable_x64(True):
        right = jax_verify.reference(program.workload, tree, batches, {})
    own = jax_verify.run(step, tree, batches, right, function)
    rounding = rounding_of("bfloat16")
    assert jax_verify.errors(own, right, "bfloat16", rounding).largest <= rounding
    assert own.weights["up"].dtype == jnp.bfloat16
    moved = jax_verify.issued_collectives(step, batches[0])
    assert differences(program.priced(), moved) == []
