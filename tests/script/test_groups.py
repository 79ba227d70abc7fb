"""Optimizers of the user's own over pieces; one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import autopar
from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.groups import check_by_element
from autopar.runtime.pytorch.optimizer_state import optimizer_state
from tests.plans import cluster
from tests.script.models import Words, words


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("groups") / "plan"
    return autopar.plan(Words, words(4), cluster(1), folder=folder, clip_norm=0.5)


def by_dim(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.05},
    ]


Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_and_schedule_are_those_of_one_device(name: str, plan: Any) -> None:
    torch.manual_seed(5)
    model = Words()
    mine = Words()
    mine.load_state_dict(model.state_dict())
    wanted, given = OPTIMIZERS[name](by_dim(mine)), OPTIMIZERS[name](by_dim(model))
    trainer: Any = autopar.load(plan, model=model, optimizer=given)
    rates = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in (given, wanted)]
    for step in range(4):
        loss = mine(**words(4, step))
        wanted.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(mine.parameters(), 0.5)
        wanted.step()
        got = trainer.step(words(4, step))
        for rate in rates:
            rate.step()
        assert float(got) == pytest.approx(float(loss.detach()), rel=1e-5)
        assert trainer.metrics.learning_rate == pytest.approx(
            (0.01 if name in ("adamw", "nadam") else 0.1) / (1 + step)
        )
    for held in trainer.held:
        torch.testing.assert_close(held.leaf.detach(), mine.get_parameter(held.name).detach())


def test_groups_by_name_and_predicate(plan: Any) -> None:
    trainer: Any = autopar.load(
        plan,
        model=Words,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1.0),
        groups=[
            {"params": ["*.bias", "*norm.weight"], "weight_decay": 0.0},
            {"params": lambda name, p: p.dim() == 2, "lr": 0.5},
        ],
    )
    names = {id(h.leaf): h.name for h in trainer.held}
    first, second = (
        {names[id(p)] for p in group["params"]} for group in trainer.optimizer.param_groups
    )
    assert first | second == set(names.values())
    assert "layers.1.norm.weight" in first
    assert "layers.0.up.weight" in second
    assert [g["lr"] for g in trainer.optimizer.param_groups] == [1.0, 0.5]
    planned: Any = autopar.load(plan, model=Words, groups=[{"params": "*", "weight_decay": 0.7}])
    assert planned.optimizer.param_groups[0]["weight_decay"] == 0.7
    assert planned.optimizer.param_groups[0]["lr"] == 1e-3  # the plan's own optimizer


def test_groups_that_overlap_or_miss_are_named(plan: Any) -> None:
    def load(**given: Any) -> None:
        autopar.load(plan, **{"model": Words, **given})

    with pytest.raises(UserError, match=r"layers\.0\.norm\.bias is in groups 0 and 1"):
        load(groups=[{"params": "*"}, {"params": "*.bias"}])
    with pytest.raises(UserError, match=r"tokens\.weight, .* are trained and in no group"):
        load(groups=[{"params": "*.bias"}])
    with pytest.raises(UserError, match="a group is a dict with params"):
        load(groups=[{"lr": 0.1}])
    model = Words()
    with pytest.raises(UserError, match=r"head\.weight are trained and in no group"):
        load(model=model, optimizer=torch.optim.SGD(list(model.parameters())[:-1], lr=0.1))
    with pytest.raises(UserError, match="that is none of the model's"):
        load(model=model, optimizer=torch.optim.SGD(Words().parameters(), lr=0.1))
    with pytest.raises(UserError, match="needs the module whose parameters"):
        load(optimizer=torch.optim.SGD(Words().parameters(), lr=0.1))
    stepped = torch.optim.Adam(model.parameters())
    model(**words(4)).backward()
    stepped.step()
    with pytest.raises(UserError, match="has taken steps"):
        load(model=model, optimizer=stepped)


class ByMatrix(torch.optim.Optimizer):
    """Divides a gradient by its norm: another step for a matrix than for its pieces."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()


def test_an_optimizer_of_whole_matrices_is_refused_where_they_are_cut() -> None:
    one = [nn.Parameter(torch.zeros(2, 2))]
    refused: tuple[Optimizer, ...] = (ByMatrix, torch.optim.Muon, torch.optim.Adafactor)
    for make in refused:
        with pytest.raises(UserError, match="updates a matrix as a whole"):
            check_by_element(make(one))
    for make in OPTIMIZERS.values():
        check_by_element(make(one))


def test_gradients_of_several_batches_add_up(plan: Any) -> None:
    torch.manual_seed(1)
    trainer: Any = autopar.load(plan, model=Words())
    halves = [words(4, seed) for seed in (1, 2)]
    each = []
    for batch in halves:
        trainer.backward(batch)
        each.append([h.leaf.grad.clone() for h in trainer.held])
    trainer.backward(halves[0], weight=0.5)
    trainer.backward(halves[1], weight=0.5, accumulate=True)
    for held, a, b in zip(trainer.held, *each, strict=True):
        torch.testing.assert_close(held.leaf.grad, (a + b) / 2)
    assert float(trainer.update()) > 0
    assert trainer.step_number == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_what_the_optimizer_kept(
    name: str, plan: Any, tmp_path: Path
) -> None:
    def trainer() -> Any:
        torch.manual_seed(2)
        model = Words()
        return autopar.load(plan, model=model, optimizer=OPTIMIZERS[name](by_dim(model)))

    one, two = trainer(), trainer()
    for step in range(2):
        one.step(words(4, step))
    one.optimizer.param_groups[1]["lr"] = 0.25
    one.save(tmp_path / "c")
    two.load(tmp_path / "c")
    assert two.optimizer.param_groups[1]["lr"] == 0.25
    for step in range(2, 4):
        assert float(one.step(words(4, step))) == float(two.step(words(4, step)))
    for a, b in zip(one.held, two.held, strict=True):
        assert torch.equal(a.leaf, b.leaf)
        for x, y in zip(
            optimizer_state(one.optimizer, a.leaf).values(),
            optimizer_state(two.optimizer, b.leaf).values(),
            strict=True,
        ):
            assert torch.equal(x, y)
