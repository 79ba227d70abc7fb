"""``autopar.plan`` and ``autopar.load(plan, model=...)`` with objects of a script, one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.own_model import skeleton
from autopar.runtime.shared.planned_workload import planned_workload
from autopar.script.planned import PlanFolder
from tests.plans import cluster, cluster_text
from tests.script.models import Words, words


@pytest.fixture(scope="module")
def one() -> Cluster:
    return cluster(1)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, one: Cluster) -> PlanFolder:
    folder = tmp_path_factory.mktemp("words") / "plan"
    return autopar.plan(Words(), words(4), one, folder=folder, learning_rate=0.02, seed=3)


def test_class_module_and_file_give_one_plan(planned: PlanFolder, tmp_path: Path) -> None:
    cores = tmp_path / "cores.yaml"
    cores.write_text(cluster_text(4))
    made = [
        autopar.plan(Words, words(8), cores, {"tp": 2, "dp_shard": 2}, tmp_path / "0").plan,
        autopar.plan(Words(), words(8), cores, ["tp=2", "dp_shard=2"], tmp_path / "1").plan,
    ]
    assert made[0].degrees["tp"] == 2
    assert made[0].spreads == made[1].spreads
    assert made[0].fingerprints.model == made[1].fingerprints.model


def test_a_plan_shows_itself(planned: PlanFolder) -> None:
    assert "\n" not in repr(planned)
    assert "test_plan" not in repr(planned)
    assert "models.py:Words" in repr(planned)
    assert "Memory of the fullest device" in str(planned)
    html = planned._repr_html_()
    assert html.startswith("<style>")
    assert "<script" not in html


def test_training_starts_from_the_weights_that_the_model_has(planned: PlanFolder) -> None:
    torch.manual_seed(7)
    model = Words()
    trainer: Any = autopar.load(planned, model=model)
    assert trainer.optimizer.defaults["lr"] == 0.02
    batch = words(4, seed=1)
    expected = model(**batch).detach()
    assert float(trainer.step(batch)) == pytest.approx(float(expected), rel=1e-6)
    given = dict(model.named_parameters())
    held = {h.name: h.leaf for h in trainer.held}
    assert held.keys() == given.keys()
    assert held["head.weight"].data_ptr() != given["head.weight"].data_ptr()


def test_a_class_starts_as_its_constructor_draws(planned: PlanFolder) -> None:
    trainer: Any = autopar.load(planned, model=Words)
    torch.manual_seed(3)
    fresh = dict(Words().named_parameters())
    assert all(torch.equal(h.leaf, fresh[h.name]) for h in trainer.held)


class Wider(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(self.head.in_features, 37, bias=False)
        self.more = nn.Linear(2, 2)


class Otherwise(Words):
    def __init__(self) -> None:
        super().__init__()
        self.norm.eps = 0.5


def test_a_model_that_is_not_the_plans_is_refused_with_the_difference(planned: PlanFolder) -> None:
    with pytest.raises(UserError, match=r"it has more\.weight, more\.bias") as error:
        autopar.load(planned, model=Wider())
    assert "head.weight is float32 [37, 16] and was float32 [31, 16]" in str(error.value)
    with pytest.raises(UserError, match=r"eps=0\.5"):
        autopar.load(planned, model=Otherwise())


def test_a_skeleton_has_no_weights_and_keeps_ties() -> None:
    model = Words()
    model.head.weight = model.tokens.weight
    made: Any = skeleton(model)
    assert all(p.is_meta for p in made.parameters())
    assert made.head.weight is made.tokens.weight
    assert not any(p.is_meta for p in model.parameters())


def test_what_is_missing_is_said(planned: PlanFolder, one: Cluster, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs batch=\.\.\.: a dict of example tensors"):
        autopar.plan(Words(), cluster=one, folder=tmp_path / "plan")
    with pytest.raises(UserError, match=r"lr=.*Did you mean learning_rate"):
        autopar.plan(Words(), words(4), one, folder=tmp_path / "plan", lr=1.0)
    with pytest.raises(UserError, match="write device='cpu'"):
        autopar.load(planned, "cpu")
    assert not (tmp_path / "plan").exists()
    on_meta = skeleton(Words())
    with pytest.raises(UserError, match="has no values"):
        autopar.load(planned, model=on_meta)


def test_a_plan_of_a_module_is_made_without_its_weights(one: Cluster, tmp_path: Path) -> None:
    made = autopar.plan(skeleton(Words()), words(4), replace(one), folder=tmp_path / "plan")
    assert made.plan.device_count == 1


@pytest.mark.parametrize("what", ["class", "notebook"])
def test_a_command_says_what_to_do_with_a_scripts_plan(
    planned: PlanFolder, tmp_path: Path, what: str
) -> None:
    plan = planned.plan
    if what == "notebook":
        plan = replace(plan, workload="script:Words")
    with pytest.raises(
        UserError, match=r"that script trains it: autopar.load\(plan, model="
    ) as refused:
        planned_workload(planned.folder, plan)
    named = "Words is a type, not a model" if what == "class" else "workload is 'script:Words'"
    assert named in str(refused.value)
    assert "and plan that file" in str(refused.value)


def test_logits_and_results_of_modules_by_name(planned: PlanFolder) -> None:
    model = Words()
    trainer: Any = autopar.load(planned, model=model)
    batch = words(3, 5)
    assert torch.equal(trainer.predict(batch), model.logits(batch["tokens"]))
    assert torch.equal(trainer.predict(batch, "tokens"), model.tokens(batch["tokens"]))
    x = model.tokens(batch["tokens"])
    for i, layer in enumerate(model.layers):
        given: Any = layer
        up, x = given.up(given.norm(x)), layer(x)
        assert torch.equal(trainer.predict(batch, f"layers.{i}"), x)
        assert torch.equal(trainer.predict(batch, f"layers.{i}.up"), up)
    for name, message in (("haed", "Did you mean head"), ("layers.1.upp", r"mean layers\.1\.up")):
        with pytest.raises(UserError, match=message):
            trainer.predict(batch, name)
    before = float(trainer.evaluate(batch))
    assert float(trainer.step(words(4))) > 0  # by the program's own forward again
    assert float(trainer.evaluate(batch)) != before
