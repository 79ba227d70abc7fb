"""Trainers of JAX pipelines: steps, checkpoints between plans, parameters, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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


OWN = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
"""Its norm is of the gradients of all stages together."""


def by_own(plans: dict[str, PlanFolder], name: str, optimizer: Any = OWN) -> Any:
    return autopar.load(plans[name], model=MODEL.loss, params=start(), optimizer=optimizer)


@pytest.mark.parametrize(
    "optimizer", [OWN, optax.adafactor(1e-2, min_dim_size_to_factor=4), optax.lamb(1e-2)]
)
@pytest.mark.parametrize("name", ["stages", "other stages"])
@pytest.mark.some(3)
def test_an_optimizer_of_ones_own_steps_as_on_one_device(
    plans: dict[str, PlanFolder], name: str, optimizer: Any
) -> None:
    trainer = by_own(plans, name, optimizer)
    params, state = start(), optimizer.init(start())
    for number in range(3):
        loss, gradients = jax.value_and_grad(MODEL.loss)(params, batch(number))
        norm = optax.tree.norm(gradients)
        clipped = jax.tree.map(lambda g, n=norm: g * min(1.0, 0.1 / (n + 1e-6)), gradients)
        changes, state = optimizer.update(clipped, state, params)
        params = optax.apply_updates(params, changes)
        assert float(trainer.step(batch(number))) == pytest.approx(float(loss), rel=1e-9)
        assert float(trainer.gradient_norm) == pytest.approx(float(norm), rel=1e-9)
        assert largest(trainer.params, params) < 1e-12
    assert largest(trainer.opt_state, state) < 1e-12
    assert trainer.step_number == 3


def tied(params: Any, batch: Any) -> Any:
    """Layers by scan between an embedding and the same as the head."""

    def layer(x: Any, own: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    x, _ = jax.lax.scan(layer, params["table"][batch["tokens"]], params["layers"])
    logs = jax.nn.log_softmax(x @ params["table"].T)
    return -jnp.take_along_axis(logs, batch["labels"][..., None], -1).mean()


def test_arrays_that_several_stages_have_parts_or_copies_of(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    sizes = {"table": (24, 8), "layers": {"up": (4, 8, 16), "down": (4, 16, 8)}}
    params = jax.tree.map(
        lambda size: jnp.array(0.3 * draws.normal(size=size)),
        sizes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    data = {name: draws.integers(0, 24, (8, 6), np.int32) for name in ("tokens", "labels")}
    fix = {"pp": 2, "dp_shard": 2, "zero": 2, "microbatch": 2}
    plan = autopar.plan(tied, data, cluster(4), fix, tmp_path, params=params, optimizer=OWN)
    trainer = autopar.load(plan, model=tied, params=params, optimizer=OWN)
    state = OWN.init(params)
    for _ in range(2):
        loss, gradients = jax.value_and_grad(tied)(params, data)
        changes, state = OWN.update(gradients, state, params)
        params = optax.apply_updates(params, changes)
        assert float(trainer.step(data)) == pytest.approx(float(loss), rel=1e-9)
    assert largest(trainer.params, params) < 1e-12


def test_it_goes_on_under_other_stages_and_under_none(
    plans: dict[str, PlanFolder], tmp_path: Path
) -> None:
    alone = by_own(plans, "no stages")
    losses = [float(alone.step(batch(number))) for number in range(4)]
    ours = []
    for number, name in enumerate(("stages", "no stages", "other stages", "stages")):
        trainer = by_own(plans, name)
        if number:
            trainer.load(tmp_path / "checkpoint")
        assert trainer.step_number == number
        ours.append(float(trainer.step(batch(number))))
        trainer.save(tmp_path / "checkpoint")
    assert ours == pytest.approx(losses, rel=1e-9)
    assert largest(trainer.params, alone.params) < 1e-12
    assert largest(trainer.opt_state, alone.opt_state) < 1e-12


def test_its_state_and_its_gradients_are_at_hand(plans: dict[str, PlanFolder]) -> None:
    trainer, stepped = by_own(plans, "stages"), by_own(plans, "stages")
    before = trainer.opt_state
    _, gradients = trainer.value_and_grad(batch())
    trainer.update(gradients)
    stepped.step(batch())
    assert largest(trainer.params, stepped.params) < 1e-12
    assert largest(trainer.opt_state, before) > 0
    trainer.params, trainer.opt_state = start(), before
    trainer.step(batch())
    assert largest(trainer.params, stepped.params) < 1e-12
    _, gradients = stepped.value_and_grad(batch(1))
    stepped.update(jax.tree.map(lambda g: g.astype(np.float32), gradients))
    trainer.step(batch(1))
    assert largest(trainer.params, stepped.params) < 1e-6
    plainly = by_own(plans, "stages", optax.sgd(0.1))
    plainly.step(batch())
    pieces = sum(leaf.nbytes for leaf in jax.tree.leaves(before)) // 4
    assert stepped.peak_memory_bytes >= plainly.peak_memory_bytes + pieces


def test_in_a_job_of_several_processes_it_is_refused(
    plans: dict[str, PlanFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = loaded(plans, "stages")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="pp=1"):
        trainer.step_by(OWN)


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
