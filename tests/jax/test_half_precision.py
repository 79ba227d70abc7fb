"""Models whose parameters are of half precision train, and are verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.nouns.workload import Workload
from autopar.runtime.jax.parallel import loss_scale
from autopar.runtime.jax.parallel.optimizer import SLOTS, optimizer_step
from autopar.runtime.jax.programs import step_alone
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.jax import verify as jax_verify
from autopar.runtime.verify.jax.compiled import compiled, issued_collectives
from autopar.runtime.verify.jax.errors import errors
from autopar.runtime.verify.jax.reference_steps import reference
from autopar.runtime.verify.verified import TOLERANCE, rounding_of
from tests.jax import models
from tests.jax.planned import made_of
from tests.plans import cluster


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
    program = made_of(
        "half", half(), {"dp_shard": "4", "tp": "2", "zero": "2"}, clip_norm=0.5, optimizer="adamw"
    )
    assert 'dtype="bfloat16"' in program.text
    exact, _ = program.exact()
    assert exact.largest <= TOLERANCE
    step = step_alone(program.program(), program.workload)
    batches = [dict(program.workload.batch(i)) for i in range(jax_verify.STEPS)]
    function = compiled(step, step.watched, batches[0])
    tree = program.workload.init(None)  # type: ignore[misc]
    with jax.enable_x64(True):
        right = reference(program.workload, tree, batches, {})
    own = jax_verify.run(step, tree, batches, right, function)
    rounding = rounding_of("bfloat16")
    assert errors(own, right, "bfloat16", rounding).largest <= rounding
    assert own.weights["up"].dtype == jnp.bfloat16
    moved = issued_collectives(step, batches[0])
    assert differences(program.priced(), moved) == []


def test_the_scale_halves_doubles_and_begins_again() -> None:
    """As that of PyTorch, whose numbers these are."""
    given = {"scale": jnp.float32(65536.0), "taken": jnp.int32(1997)}
    for overflow in (False, False, False, False, True, False):
        given = loss_scale.next_scale(given, jnp.array(overflow))
    assert (float(given["scale"]), int(given["taken"])) == (65536.0, 1)


@pytest.mark.parametrize("own", [False, True])
def test_a_step_that_overflows_is_left_out_everywhere_and_the_scale_is_saved(
    tmp_path: Path, own: bool
) -> None:
    """Of one device's rows alone the gradients overflow."""
    given = models.mlp()
    start = models.concrete(given.params, "float32", seed=1)
    batch = {name: np.array(a) for name, a in models.concrete(given.batch, "float32").items()}
    fix = {"dp_shard": 2, "tp": 2, "zero": 2 if own else 1}
    more: dict[str, Any] = {"params": start, **({"optimizer": optax.adam(1e-3)} if own else {})}
    plan = autopar.plan(
        given.loss, batch, cluster(4), fix, tmp_path / "plan", precision="float16", clip_norm=1.0,
        **more,
    )  # fmt: skip
    trainer: Any = autopar.load(plan, model=given.loss, **more)

    def held() -> Any:
        return jax.tree.map(np.asarray, (trainer.params, trainer.opt_state, trainer.step_number))

    before = held()
    assert trainer.loss_scale == 65536.0
    odd = {**batch, "x": batch["x"].copy()}
    odd["x"][0, 0] = 6e4
    trainer.step(odd)
    assert trainer.loss_scale == 32768.0
    assert np.isinf(trainer.gradient_norm)
    assert jax.tree.all(jax.tree.map(np.array_equal, held(), before))
    exact = jax.value_and_grad(given.loss)(start, batch)
    loss, gradients = trainer.value_and_grad(batch)
    assert float(loss) == pytest.approx(float(exact[0]), rel=1e-2)
    for ours, theirs in zip(*map(jax.tree.leaves, (gradients, exact[1])), strict=True):
        assert np.linalg.norm(ours - theirs) < 2e-2 * np.linalg.norm(theirs)
    trainer.step(batch)
    assert (trainer.step_number, trainer.loss_scale) == (1, 32768.0)
    assert not jax.tree.all(jax.tree.map(np.array_equal, held(), before))
    trainer.save(tmp_path / "saved")
    other: Any = autopar.load(plan, model=given.loss, **more)
    other.load(tmp_path / "saved")
    assert (other.loss_scale, int(other.state["scale"]["taken"])) == (32768.0, 1)


def test_float16_is_verified_and_its_collectives_are_priced() -> None:
    program = made_of(
        "mlp",
        models.mlp(),
        {"dp_shard": "2", "tp": "2", "zero": "2"},
        precision="float16",
        optimizer="adamw",
    )
    errors, _ = program.exact()
    assert errors.largest <= TOLERANCE
    step = step_alone(program.program(), program.workload)
    moved = issued_collectives(step, dict(program.workload.batch(0)))
    assert [row.axis for row in moved if row.size_bytes == 4].count("dp_replicate+dp_shard+tp") == 1
    assert differences(program.priced(), moved) == []
