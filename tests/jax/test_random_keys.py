"""Random keys in a loss: dropout and noise, whose numbers are those of one device alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.files import plan_folder
from autopar.frontends.jax import capture
from autopar.nouns.errors import UserError
from autopar.runtime.jax.load import read
from autopar.runtime.jax.programs import read_step
from tests.jax import models
from tests.plans import cluster

LAYERS = 3


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def dropped(key: Any, x: Any, keep: float = 0.75) -> Any:
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0.0)


def mlp(params: Any, batch: Mapping[str, Any]) -> Any:
    """Dropout, noise that is scaled by a parameter, and one mask for all samples."""
    first, second, third = jax.random.split(batch["key"], 3)
    h = jax.nn.relu(batch["x"] @ params["up"]["weight"].T + params["up"]["bias"])
    h = dropped(first, h) * jax.random.bernoulli(third, 0.8, h.shape[1:])
    y = h @ params["down"]["weight"].T
    y = y + params["down"]["bias"] * jax.random.normal(second, y.shape, y.dtype)
    return jnp.mean((y - batch["y"]) ** 2)


def layer(x: Any, row: tuple[Any, Any]) -> tuple[Any, None]:
    params, key = row
    return x + dropped(key, jnp.tanh(x @ params["weight"].T + params["bias"])), None


def scanned(params: Any, batch: Mapping[str, Any]) -> Any:
    keys = jax.random.split(batch["key"], LAYERS)
    x, _ = jax.lax.scan(layer, batch["x"], (params["layers"], keys))
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def written_out(params: Any, batch: Mapping[str, Any]) -> Any:
    """One layer after the other, each with a key that the loss folds for it."""
    x = batch["x"]
    for i, own in enumerate(params["layers"]):
        x, _ = jax.checkpoint(layer)(x, (own, jax.random.fold_in(batch["key"], i)))
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def carried(params: Any, batch: Mapping[str, Any]) -> Any:
    """The key goes from layer to layer, which each split it."""

    def step(carry: Any, row: Any) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        return (layer(x, (row, own))[0], key), None

    (x, _), _ = jax.lax.scan(step, (batch["x"], batch["key"]), params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


W = models.W
STACK = {
    "layers": {"weight": models.shape(LAYERS, W, W), "bias": models.shape(LAYERS, W)},
    "head": models.shape(W, W),
}
LIST = {
    "layers": [{"weight": models.shape(W, W), "bias": models.shape(W)}] * LAYERS,
    "head": models.shape(W, W),
}
CASES: dict[str, tuple[Callable[..., Any], Any, dict[str, int], bool]] = {
    "tp": (mlp, models.mlp().params, {"dp_shard": 2, "tp": 2, "zero": 1}, True),
    "microbatches": (mlp, models.mlp().params, {"dp_shard": 2, "microbatch": 2, "zero": 3}, False),
    "scan": (scanned, STACK, {"dp_shard": 2, "tp": 2, "zero": 3}, False),
    "written_out": (written_out, LIST, {"dp_shard": 2, "zero": 2}, True),
    "carried": (carried, STACK, {"dp_replicate": 2, "microbatch": 2}, True),
}


def start(params: Any) -> Any:
    return models.concrete(params, "float64", seed=5)


def batch(typed: bool, step: int = 0, samples: int = models.B) -> dict[str, Any]:
    made = models.concrete(models.mlp().batch, "float64", seed=step)
    key = jax.random.fold_in((jax.random.key if typed else jax.random.PRNGKey)(3), step)
    return {**{name: np.asarray(a)[:samples] for name, a in made.items()}, "key": key}


def planned(folder: Path, name: str) -> Any:
    loss, params, fix, typed = CASES[name]
    devices = fix.get("tp", 1) * fix.get("dp_shard", 1) * fix.get("dp_replicate", 1)
    plan = autopar.plan(loss, batch(typed), cluster(devices), fix, folder, params=start(params))
    return autopar.load(
        plan, model=loss, params=start(params), optimizer=optax.sgd(0.1) if typed else None
    )


def largest(ours: Any, theirs: Any) -> float:
    apart = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), ours, theirs)
    return float(max(jax.tree.leaves(apart)))


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_device_with_the_same_keys(tmp_path: Path, name: str) -> None:
    loss, params, _, typed = CASES[name]
    trainer = planned(tmp_path / "plan", name)
    graph = plan_folder.read_graph(tmp_path / "plan")
    layers = [len(block.instances) for block in graph.blocks.values()]
    assert layers == ([] if loss is mlp else [LAYERS])
    program = (tmp_path / "plan" / "program" / "model.py").read_text()
    assert ("each=(jnp.stack((key_0, key_1" in program) is (loss is not mlp)  # and so a loop
    alone = jax.jit(jax.value_and_grad(loss))
    own = start(params)
    for number in range(2):
        given = batch(typed, number)
        value, gradients = alone(trainer.params, given)
        made, exact = trainer.value_and_grad(given)
        assert float(made) == pytest.approx(float(value), rel=1e-12)
        assert largest(exact, gradients) < 1e-12
        assert float(trainer.step(given)) == pytest.approx(float(value), rel=1e-12)
        own = jax.tree.map(lambda p, g: p - 0.1 * g, own, alone(own, given)[1])
    assert not typed or largest(own, trainer.params) < 1e-12
    for samples in (models.B, 3):
        given = batch(typed, 7, samples)
        value = jax.jit(loss)(trainer.params, given)
        assert float(trainer.evaluate(given)) == pytest.approx(float(value), rel=1e-12)


def test_a_key_is_of_the_kind_that_was_planned(tmp_path: Path) -> None:
    trainer = planned(tmp_path / "plan", "tp")
    for wrong in (jax.random.PRNGKey(0), jax.random.split(jax.random.key(0)), None):
        with pytest.raises(UserError, match=r"batch\['key'\] is .*random key, key<fry> \[\]"):
            trainer.step({**batch(True), "key": wrong})
    assert trainer.step_number == 0


def test_the_loop_of_a_program_draws_the_same(tmp_path: Path) -> None:
    """``python plan/program/train.py``, of a plan whose file gives the batches."""
    loss, params, _, _ = CASES["tp"]
    trainer = planned(tmp_path / "plan", "tp")
    begun = read(tmp_path / "plan", model=loss, params=start(params))
    whole = replace(begun.workload, batch=lambda step: batch(True, step))
    begun = replace(begun, workload=whole)
    step = read_step(tmp_path / "plan", whole)
    made = step.step(trainer.compiled.initial(begun.parameters),
                     step.cut(begun.batch(3)))  # fmt: skip
    assert float(made[1]) == float(trainer.step(batch(True, 3)))


def of_data(params: Any, given: Mapping[str, Any]) -> Any:
    h = given["x"] @ params["head"]
    return jnp.mean(dropped(jax.random.fold_in(given["key"], h[0, 0].astype(int)), h))


def of_choice(params: Any, given: Mapping[str, Any]) -> Any:
    one, other = jax.random.split(given["key"])
    key = jnp.where(given["x"][0, 0] > 0, one, other)
    return jnp.mean(dropped(key, given["x"] @ params["head"]))


def of_branch(params: Any, given: Mapping[str, Any]) -> Any:
    h = given["x"] @ params["head"]
    return jnp.mean(jax.lax.cond(h[0, 0] > 0, lambda: dropped(given["key"], h), lambda: h))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (of_data, "from parameters or data.*fold_in.*where the batch is made"),
        (of_choice, "a random key beside parameters or data"),
        (of_branch, "inside of a cond: draw them before"),
    ],
)
def test_a_key_that_follows_from_data_is_refused(loss: Any, message: str) -> None:
    given = {"x": models.shape(8, W), "key": jax.random.key(0)}
    with pytest.raises(UserError, match=message):
        capture(loss, {"head": STACK["head"]}, given)


def of_step(params: Any, given: Mapping[str, Any]) -> Any:
    key = jax.random.fold_in(jax.random.key(given["seed"]), given["step"])
    return jnp.mean(dropped(key, given["x"] @ params["head"])) * given["step"]


def test_keys_may_follow_from_integers_of_the_batch() -> None:
    shapes = {"x": models.shape(8, W), "step": models.ids(), "seed": models.ids()}
    captured = capture(of_step, {"head": STACK["head"]}, shapes)
    kinds = {e.name: e.kind for e in captured.batch}
    assert kinds == {
        "x": "data", "step_0": "drawn", "step_1": "drawn", "step": "key", "seed": "key",
    }  # fmt: skip
    params, x = {"head": jnp.eye(W)}, jnp.ones((8, W))
    for step in (1, np.int32(2)):
        given = {"x": x, "step": step, "seed": 3}
        made = captured.draws.loss(params, captured.draws.drawn(given))
        assert float(made) == pytest.approx(float(of_step(params, given)))
    with pytest.raises(UserError, match=r"is float64 \[\]; .* what keys follow from, int32"):
        captured.draws.drawn({"x": x, "step": np.float64(1), "seed": 3})


def test_masks_are_asked_for_in_their_smallest_form() -> None:
    """A mask as it is drawn, not widened and scaled; and nothing that data could make again."""

    def loss(params: Any, given: Mapping[str, Any]) -> Any:
        h = given["x"] @ params["head"]
        keep = jax.random.bernoulli(given["key"], 0.5, h.shape)
        return jnp.mean(h * (keep.astype(h.dtype) / 0.5)) * jax.random.uniform(given["key"])

    given = {"x": models.shape(8, W), "key": jax.random.key(0)}
    captured = capture(loss, {"head": STACK["head"]}, given)
    drawn = {e.name: (e.dtype, e.shape, e.batch_dim) for e in captured.batch if e.kind == "drawn"}
    assert drawn == {"key_0": ("bool", (8, W), 0), "key_1": ("float64", (), None)}
    keyed = capture(lambda p, b: loss(p, {**b, "key": jax.random.key(3)}), {"head": STACK["head"]},
                    {"x": given["x"]})  # fmt: skip
    assert [e.name for e in keyed.batch] == ["x", "random_0", "random_1"]
