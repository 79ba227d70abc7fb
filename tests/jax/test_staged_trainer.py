"""Trainers of JAX pipelines: steps, checkpoints between plans, parameters, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.nouns.errors import UserError
from autopar.runtime.shared.planned_batch import OtherBatch
from autopar.script.planned import PlanFolder
from tests.jax.test_script import MODEL, batch, largest, scored, start
from tests.plans import cluster

FIXES: dict[str, dict[str, Any]] = {
    "stages": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "other stages": {"pp": 4, "schedule": "zb-h1"},
    "no stages": {"dp_replicate": 2},
}


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PlanFolder]:
    home, made = tmp_path_factory.mktemp("plans"), {}
    for name, fix in FIXES.items():
        devices = 2 if name == "no stages" else 4
        made[name] = autopar.plan(
            MODEL.loss, batch(), cluster(devices), fix, home / name,
            params=start(), clip_norm=0.1,
        )  # fmt: skip
    return made


def loaded(plans: dict[str, PlanFolder], name: str) -> Any:
    return autopar.load(plans[name], model=MODEL.loss, params=start())


@pytest.fixture(scope="module")
def stages(plans: dict[str, PlanFolder]) -> Any:
    return loaded(plans, "stages")


def test_a_training_goes_on_under_other_stages_and_under_none(
    plans: dict[str, PlanFolder], tmp_path: Path
) -> None:
    alone = loaded(plans, "no stages")
    losses = [float(alone.step(batch(number))) for number in range(4)]
    ours = []
    for number, name in enumerate(("stages", "other stages", "no stages")):
        trainer = loaded(plans, name)
        if number:
            trainer.load(tmp_path / "checkpoint")
        assert trainer.step_number == number
        ours.append(float(trainer.step(batch(number))))
        trainer.save(tmp_path / "checkpoint")
    again = loaded(plans, "stages")
    again.load(tmp_path / "checkpoint")
    ours.append(float(again.step(batch(3))))
    assert ours == pytest.approx(losses, rel=1e-9)
    assert largest(again.params, alone.params) < 1e-9
    assert float(again.gradient_norm) == pytest.approx(float(alone.gradient_norm), rel=1e-9)


def test_parameters_are_the_users_tree_on_the_host(stages: Any) -> None:
    before = stages.params
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(before))
    stages.step(batch(1))
    assert largest(stages.params, before) > 0
    stages.params = before
    assert largest(stages.params, before) == 0
    assert stages.peak_memory_bytes > 0


def test_evaluation_goes_forward_alone(stages: Any) -> None:
    before = stages.params
    loss = float(stages.evaluate(batch(5)))
    assert loss == pytest.approx(float(MODEL.loss(before, batch(5))), rel=1e-9)
    assert largest(stages.params, before) == 0
    with pytest.raises(OtherBatch, match="as they were planned"):
        stages.evaluate(batch(5, 3))


def test_what_a_loss_returns_beside_comes_with_a_step(tmp_path: Path) -> None:
    plan = autopar.plan(
        scored, batch(), cluster(4), FIXES["stages"], tmp_path, params=start(), has_aux=True
    )
    trainer: Any = autopar.load(plan, model=scored, params=start())
    wanted = scored(start(), batch())
    for made in (trainer.evaluate(batch()), trainer.step(batch())):
        assert largest(made, wanted) < 1e-12
    assert largest(trainer.evaluate(batch(1)), scored(trainer.params, batch(1))) < 1e-12


def test_gradients_are_the_users_tree_on_the_host(plans: dict[str, PlanFolder]) -> None:
    trainer, stepped = loaded(plans, "other stages"), loaded(plans, "other stages")
    loss, gradients = trainer.value_and_grad(batch(2))
    assert float(loss) == pytest.approx(float(MODEL.loss(start(), batch(2))), rel=1e-9)
    assert largest(gradients, jax.grad(MODEL.loss)(start(), batch(2))) < 1e-9
    assert largest(trainer.params, start()) == 0
    norm = trainer.update(gradients)
    stepped.step(batch(2))
    assert largest(trainer.params, stepped.params) < 1e-12
    assert float(norm) == pytest.approx(float(stepped.gradient_norm), rel=1e-9)


def test_an_optimizer_of_ones_own_has_no_place_with_all_parameters(
    plans: dict[str, PlanFolder],
) -> None:
    with pytest.raises(UserError, match="pp=1"):
        autopar.load(plans["stages"], model=MODEL.loss, params=start(), optimizer=optax.sgd(0.1))


@pytest.mark.parametrize(("fix", "pp"), [({"tp": 2}, "1"), ({"pp": 2}, "2")])
def test_scripts_have_stages_where_they_ask_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fix: dict[str, int], pp: str
) -> None:
    """A search that is free would take stages wherever they are faster."""

    class Asked(Exception):
        pass

    def search(name: str, cluster: Any, fixed: dict[str, str], *_: Any, **__: Any) -> None:
        assert fixed["pp"] == pp
        raise Asked

    monkeypatch.setattr("autopar.cli.commands.search", search)
    with pytest.raises(Asked):
        autopar.plan(MODEL.loss, batch(), cluster(4), fix, tmp_path / "plan", params=start())
