"""Arrays that a user gives stay the user's: readable and unchanged behind steps, which write over
their own. What was not shared is not copied again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.nouns.errors import UserError
from autopar.runtime.jax.parallel import placed
from autopar.runtime.jax.processes import owned
from autopar.runtime.jax.stored import stored
from tests.plans import cluster

Tree = Any
LAYERS, WIDTH = 2, 16
FIXES: Mapping[str, tuple[int, dict[str, int]]] = {
    "one device": (1, {}),
    "whole": (4, {"dp_replicate": 4}),
    "split": (4, {"tp": 4}),
    "zero 3": (4, {"dp_shard": 4, "zero": 3}),
}


def loss(params: Tree, batch: Mapping[str, Any]) -> Any:
    def layer(x: Any, own: Tree) -> Any:
        return x + jnp.tanh(x @ own["up"]), None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["first"], params["layers"])
    return jnp.mean((x @ params["last"] + params["bias"]) ** 2)


def params(seed: int = 0) -> Tree:
    draws = iter(jax.random.split(jax.random.key(seed), 8))

    def made(*shape: int) -> Any:
        return jax.random.normal(next(draws), shape) / 4

    return {
        "first": made(WIDTH, WIDTH),
        "layers": {"up": made(LAYERS, WIDTH, WIDTH)},
        "last": made(WIDTH, WIDTH),
        "bias": jnp.zeros(WIDTH),
    }


def batch() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32)}


def copies(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: np.array(a, copy=True), tree)


def check_unchanged(tree: Tree, before: Tree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert not (isinstance(leaf, jax.Array) and leaf.is_deleted()), path
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, tree), before)


@pytest.fixture(scope="module", params=FIXES)
def trainer_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    devices, fix = FIXES[request.param]
    folder = tmp_path_factory.mktemp("ownership")
    plans: list[tuple[dict[str, Any], Any]] = []

    def planned(how: dict[str, Any], tree: Tree) -> Any:
        """Once for the same options: what a plan reads of parameters are their shapes."""
        for known, plan in plans:
            if known == how:
                return plan
        place = folder / f"plan {len(plans)}"
        plan = autopar.plan(loss, batch(), cluster(devices), fix, place, params=tree, **how)
        plans.append((how, plan))
        return plan

    def load(tree: Tree, **options: Any) -> Any:
        how = {n: v for n, v in options.items() if n in ("frozen", "optimizer")}
        return autopar.load(planned(how, tree), model=loss, params=tree, **options)

    return load


def test_parameters_given_to_load_stay(trainer_of: Callable[..., Any]) -> None:
    given = params()
    before = copies(given)
    trainer = trainer_of(given)
    losses = [float(trainer.step(batch())) for _ in range(2)]
    check_unchanged(given, before)
    assert losses[1] < losses[0]
    # as they lie in the trainer, they share memory if they are not copied
    lying = trainer.params
    before = copies(lying)
    trainer.params = lying
    trainer.step(batch())
    check_unchanged(lying, before)
    again = trainer_of(lying)
    again.step(batch())
    check_unchanged(lying, before)


def test_frozen_parameters_stay(trainer_of: Callable[..., Any]) -> None:
    given = params()
    before = copies(given)
    trainer = trainer_of(given, frozen=["first", "layers.*"])
    read = trainer.params
    trained = copies(read)
    for _ in range(2):
        trainer.step(batch())
    check_unchanged(given, before)
    check_unchanged(read, trained)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-2),
        optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2, 0.9),  # its state has the parameters
    ],
    ids=["adamw", "schedule free"],
)
def test_a_state_of_the_optimizer_stays(trainer_of: Callable[..., Any], optimizer: Any) -> None:
    given = params()
    before = copies(given)
    trainer = trainer_of(given, optimizer=optimizer)
    trainer.step(batch())
    own = optimizer.init(given)
    fresh = copies(own)
    for state, known in ((own, fresh), (trainer.opt_state, copies(trainer.opt_state))):
        trainer.opt_state = state
        trainer.step(batch())
        check_unchanged(state, known)
    check_unchanged(given, before)


def test_a_state_that_is_set_is_stepped_on(trainer_of: Callable[..., Any]) -> None:
    optimizer = optax.sgd(1e-2, 0.9)
    trainer = trainer_of(params(), optimizer=optimizer)
    first = float(trainer.step(batch()))
    trainer.params, trainer.opt_state = params(), optimizer.init(params())
    assert float(trainer.step(batch())) == first
    with pytest.raises(UserError, match="not that of the optimizer"):
        trainer.opt_state = optax.adamw(1e-2).init(params())
    wrong = jax.tree.map(lambda a: jnp.zeros((3, *a.shape)), optimizer.init(params()))
    with pytest.raises(UserError, match=r"opt_state: .* has shape"):
        trainer.opt_state = wrong


def test_a_plan_without_an_optimizer_of_its_own_has_no_state_to_set(
    trainer_of: Callable[..., Any],
) -> None:
    trainer = trainer_of(params())
    assert trainer.opt_state is None
    with pytest.raises(UserError, match="the plan's own optimizer steps here"):
        trainer.opt_state = {}
    with pytest.raises(UserError, match="is a shape without numbers"):
        trainer.params = jax.eval_shape(params)


def test_numpy_arrays_of_the_user_are_not_looked_at_again(
    trainer_of: Callable[..., Any],
) -> None:
    given = copies(params())
    trainer = trainer_of(given)
    kept = copies(trainer.params)
    jax.tree.map(lambda a: a.fill(7.0), given)
    check_unchanged(trainer.params, kept)


def test_only_what_shares_memory_is_copied(
    trainer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(params())
    step, tree = trainer.compiled, trainer.tree
    specs = placed(step.mesh, step.held_specs["params"])
    copied: list[Any] = []

    def copy(array: Any) -> Any:
        copied.append(array)
        return jnp.copy(array)

    monkeypatch.setattr("autopar.runtime.jax.processes._copy", copy)
    odd = np.zeros(4 * WIDTH * WIDTH + 1, np.float32)[1:].reshape(4, WIDTH, WIDTH)  # not aligned
    host = {"first": odd[0], "last": odd[1]}
    there = owned(host, {name: specs[name] for name in host})
    assert copied == []
    owned(there, {name: specs[name] for name in host})
    assert len(copied) == 2
    stored(step, tree, copies(params()))
    assert all(a.size < LAYERS * WIDTH * WIDTH for a in copied)


def test_arrays_that_the_loss_closes_over_stay(tmp_path: Path) -> None:
    table = jax.random.normal(jax.random.key(3), (64, WIDTH))
    before = np.array(table, copy=True)

    def closed(params: Tree, batch: Mapping[str, Any]) -> Any:
        return jnp.mean((batch["x"] @ params["w"] @ table.T) ** 2)

    given = {"w": jnp.ones((WIDTH, WIDTH))}
    plan = autopar.plan(closed, batch(), cluster(1), {}, tmp_path / "plan", params=given)
    trainer = autopar.load(plan, model=closed, params=given)
    for _ in range(2):
        trainer.step(batch())
    check_unchanged(table, before)
