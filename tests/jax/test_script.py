"""Plans inside a user's own JAX script: a loss function, its parameters, an optax optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import autopar
from autopar.nouns.errors import UserError
from autopar.script.planned import PlanFolder
from tests.jax import models
from tests.plans import cluster

MODEL = models.mlp()
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 9)
FIXES: dict[str, tuple[int, dict[str, int]]] = {
    "tp_zero1": (4, {"dp_shard": 2, "tp": 2, "zero": 1}),
    "zero3": (4, {"dp_shard": 4, "zero": 3, "microbatch": 1}),
    "replicate": (2, {"dp_replicate": 2}),
}


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def shapes() -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float64"), MODEL.params)


def start() -> Any:
    return models.concrete(MODEL.params, "float64", seed=5)


def batch(seed: int = 0, samples: int = models.B) -> dict[str, np.ndarray]:
    made = models.concrete(MODEL.batch, "float64", seed=seed)
    return {name: np.asarray(a)[:samples] for name, a in made.items()}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PlanFolder]:
    folder = tmp_path_factory.mktemp("plans")
    return {
        name: autopar.plan(
            MODEL.loss, batch(), cluster(devices), fix, folder / name, params=shapes()
        )
        for name, (devices, fix) in FIXES.items()
    }


def chosen() -> dict[str, Any]:
    matrices = jax.tree.map(lambda leaf: len(leaf.shape) > 1, MODEL.params)
    clipped = optax.clip_by_global_norm(0.5)
    kinds = {"matrix": optax.sgd(SCHEDULE, 0.9), "vector": optax.lion(1e-3)}
    labels = jax.tree.map(lambda matrix: "matrix" if matrix else "vector", matrices)
    return {
        "adamw": optax.chain(clipped, optax.adamw(SCHEDULE, weight_decay=0.1, mask=matrices)),
        "adafactor": optax.adafactor(SCHEDULE, min_dim_size_to_factor=8),
        "several": optax.multi_transform(kinds, labels),
        "noise": optax.chain(
            optax.add_noise(0.01, 0.55, jax.random.key(7)), optax.sgd(SCHEDULE, 0.9)
        ),
    }


def by_hand(optimizer: Any, steps: int) -> tuple[list[float], Any]:
    """On one device, by the functions of optax."""

    def step(params: Any, state: Any, given: Any) -> Any:
        loss, gradients = jax.value_and_grad(MODEL.loss)(params, given)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, loss

    params, losses, step = start(), [], jax.jit(step)
    state = optimizer.init(params)
    for number in range(steps):
        params, state, loss = step(params, state, batch(number))
        losses.append(float(loss))
    return losses, params


def largest(ours: Any, theirs: Any) -> float:
    apart = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), ours, theirs)
    return float(max(jax.tree.leaves(apart)))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "several", "noise"])
@pytest.mark.some(2)
def test_any_transformation_steps_as_on_one_device(
    plans: dict[str, PlanFolder], tmp_path: Path, name: str
) -> None:
    """With a schedule; saved under one plan, gone on with under another on fewer devices."""
    optimizer = chosen()[name]
    losses, params = by_hand(optimizer, 5)
    first = autopar.load(
        plans["tp_zero1" if name == "adamw" else "zero3"],
        model=MODEL.loss, params=start(), optimizer=optimizer,
    )  # fmt: skip
    ours = [float(first.step(batch(number))) for number in range(3)]
    moments = [leaf for leaf in jax.tree.leaves(first.opt_state) if leaf.size > 512]
    assert all("dp_shard" in str(leaf.sharding.spec) for leaf in moments)
    assert moments or name == "adafactor"
    first.save(tmp_path / "checkpoint")
    second = autopar.load(plans["replicate"], model=MODEL.loss, params=start(), optimizer=optimizer)
    second.load(tmp_path / "checkpoint")
    assert second.step_number == 3
    ours += [float(second.step(batch(number))) for number in (3, 4)]
    assert ours == pytest.approx(losses, rel=1e-12)
    assert largest(second.params, params) < 1e-9  # adafactor divides by roots of tiny numbers


@pytest.fixture(scope="module")
def trainer(plans: dict[str, PlanFolder]) -> Any:
    return autopar.load(plans["tp_zero1"], model=MODEL.loss, params=start())


def test_gradients_alone_and_an_update_of_ones_own(trainer: Any) -> None:
    before = trainer.params
    loss, gradients = trainer.value_and_grad(batch(1))
    wanted, exact = jax.value_and_grad(MODEL.loss)(start(), batch(1))
    assert float(loss) == pytest.approx(float(wanted), rel=1e-12)
    assert largest(gradients, exact) < 1e-12
    assert isinstance(jax.tree.leaves(gradients)[0].sharding, NamedSharding)
    trainer.params = jax.tree.map(lambda p, g: p - 0.1 * g, trainer.params, gradients)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, start(), exact)
    assert largest(trainer.params, moved) < 1e-12
    assert float(trainer.evaluate(batch(1))) == pytest.approx(float(MODEL.loss(moved, batch(1))))
    trainer.params = before
    assert largest(trainer.params, start()) == 0
    assert trainer.step_number == 0


def test_gradients_of_several_batches_step_the_plans_optimizer(
    plans: dict[str, PlanFolder], trainer: Any
) -> None:
    other = autopar.load(plans["tp_zero1"], model=MODEL.loss, params=start())
    pair = [trainer.value_and_grad(batch(2))[1] for _ in range(2)]
    trainer.update(jax.tree.map(lambda a, b: (a + b) / 2, *pair))
    other.step(batch(2))
    assert trainer.step_number == other.step_number == 1
    assert largest(trainer.params, other.params) < 1e-12


@pytest.mark.parametrize("samples", [models.B, 3])
def test_evaluation_takes_any_number_of_samples_and_leaves_nothing(
    trainer: Any, samples: int
) -> None:
    given, state = batch(3, samples), jax.tree.map(np.asarray, trainer.state)
    wanted = float(MODEL.loss(trainer.params, given))
    assert float(trainer.evaluate(given)) == pytest.approx(wanted, rel=1e-12)
    assert largest(trainer.state, state) == 0


def test_other_functions_take_the_parameters_as_they_are(trainer: Any) -> None:
    def outputs(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["up"]["weight"].T + params["up"]["bias"])

    held = trainer.params
    made = jax.jit(outputs)(held, batch()["x"])
    trainer.step(batch(4))  # gives the memory of its own parameters away
    assert largest(made, outputs(held, jnp.asarray(batch()["x"]))) < 1e-12


def test_frozen_parameters_stay_and_have_no_state(tmp_path: Path) -> None:
    fix = {"dp_shard": 2, "tp": 2, "zero": 3}
    given = {"params": start(), "frozen": "up.*"}
    plan = autopar.plan(MODEL.loss, batch(), cluster(4), fix, tmp_path / "plan", **given)
    optimizer = optax.adam(1e-2)
    trainer: Any = autopar.load(plan, model=MODEL.loss, optimizer=optimizer, **given)
    assert {leaf.shape for leaf in jax.tree.leaves(trainer.opt_state)} == {(), (32, 64), (32,)}

    def down(own: Any, given: Any) -> Any:
        return MODEL.loss({**start(), "down": own}, given)

    own = start()["down"]
    state = optimizer.init(own)
    for number in range(3):
        loss, gradients = jax.value_and_grad(down)(own, batch(number))
        changes, state = optimizer.update(gradients, state, own)
        own = optax.apply_updates(own, changes)
        assert float(trainer.step(batch(number))) == pytest.approx(float(loss), rel=1e-12)
    assert largest(trainer.params, {**start(), "down": own}) < 1e-12
    assert trainer.value_and_grad(batch())[1]["up"] == {"bias": None, "weight": None}
    made = jax.jit(MODEL.loss)(trainer.params, batch(0, 3))
    assert float(trainer.evaluate(batch(0, 3))) == pytest.approx(float(made), rel=1e-12)
    trainer.params = start()
    assert largest(trainer.params, start()) == 0
    held = jax.tree.leaves(trainer.state["frozen"])
    assert any("tp" in str(leaf.sharding.spec) for leaf in held)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "uncalled": ({"optimizer": optax.adamw}, r"optimizer=adamw.*call it, as in .*adamw\(1e-3\)"),
    "groups": ({"groups": []}, "optax.multi_transform"),
    "shapes": ({"params": shapes()}, "'down.bias' is a shape without numbers"),
    "frozen": ({"frozen": ["up.wieght"]}, r"frozen='up.wieght'.*mean.*up.weight"),
    "all frozen": ({"frozen": "*"}, "all 4 parameters: leave one"),
    "no parameters": ({"params": None}, "params=..."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_with_help(plans: dict[str, PlanFolder], case: str) -> None:
    given, message = BAD[case]
    given = {"model": MODEL.loss, "params": start(), **given}
    with pytest.raises(UserError, match=message):
        autopar.load(plans["replicate"], **given)


def test_parameters_and_batches_of_another_shape(trainer: Any) -> None:
    odd = start()
    odd["up"]["bias"] = odd["up"]["bias"][:-1]
    with pytest.raises(UserError, match=r"'up.bias' has shape \[63\].*\[64\]"):
        trainer.params = odd
    with pytest.raises(UserError, match="only the number of samples"):
        trainer.evaluate({**batch(), "y": batch()["y"][:, :3]})
    with pytest.raises(UserError, match="x 8, y 3"):
        trainer.evaluate({**batch(), "y": batch()["y"][:3]})


def test_a_loss_without_its_parameters(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="as a JAX loss does: give its parameters"):
        autopar.plan(MODEL.loss, batch(), cluster(2), folder=tmp_path / "plan")
    with pytest.raises(UserError, match="not both"):
        autopar.plan(
            MODEL.loss, batch(), cluster(2), folder=tmp_path / "p", params=1, init=lambda key: 1
        )


def scored(params: Any, given: Any) -> Any:
    """A sum over samples, rows of each, a count, a number and the loss itself beside the loss."""
    h = jax.nn.relu(given["x"] @ params["up"]["weight"].T + params["up"]["bias"])
    y = h @ params["down"]["weight"].T + params["down"]["bias"]
    loss = jnp.mean((y - given["y"]) ** 2)
    right = jnp.argmax(y, -1) == jnp.argmax(given["y"], -1)
    rows = {"outputs": y, "best": jnp.argmax(y, -1)}
    return loss, {**rows, "right": right.sum(), "share": right.mean(), "seven": 7.0, "loss": loss}


@pytest.mark.parametrize("name", FIXES)
def test_what_a_loss_returns_beside_is_that_of_the_whole_batch(
    plans: dict[str, PlanFolder], tmp_path: Path, name: str
) -> None:
    devices, fix = FIXES[name]
    plan = autopar.plan(
        scored, batch(), cluster(devices), fix, tmp_path / name, params=start(), has_aux=True
    )
    optimizer = optax.adam(1e-2) if name == "zero3" else None
    trainer: Any = autopar.load(plan, model=scored, params=start(), optimizer=optimizer)
    assert trainer.compiled.layout.settings.microbatches == (2 if name == "zero3" else 1)
    wanted = scored(start(), batch())

    def same(made: Any) -> None:
        assert largest(made, wanted) < 1e-12
        assert jax.tree.map(lambda a: jnp.result_type(a), made) == jax.tree.map(
            lambda a: jnp.result_type(a), wanted
        )

    same(trainer.evaluate(batch()))
    pair, gradients = trainer.value_and_grad(batch())
    same(pair)
    assert largest(gradients, jax.grad(MODEL.loss)(start(), batch())) < 1e-12
    same(trainer.step(batch()))
    assert largest(trainer.evaluate(batch(1, 3)), scored(trainer.params, batch(1, 3))) < 1e-12


def test_what_is_no_aux(tmp_path: Path) -> None:
    def passed_on(params: Any, given: Any) -> Any:
        return MODEL.loss(params, given), given["x"]

    for loss, message in (
        (MODEL.loss, "returns .loss, aux."),
        (passed_on, "'x' in aux as it came"),
    ):
        with pytest.raises(UserError, match=message):
            autopar.plan(
                loss, batch(), cluster(2), folder=tmp_path / "p", params=start(), has_aux=True
            )
    with pytest.raises(UserError, match="has_aux=True is for one that returns"):
        autopar.plan(passed_on, batch(), cluster(2), folder=tmp_path / "p", params=start())
