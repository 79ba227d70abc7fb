"""What an optimizer of the user's keeps is in the plan's memory, in either framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

import autopar
from autopar.nouns.errors import UserError
from autopar.nouns.optimizer import is_own, own_name, state_per_parameter
from autopar.runtime.given_model import name_of_optimizer
from tests.plans import cluster
from tests.script.models import Words, words

PARAMS = {"matrix": np.ones((64, 64), np.float32), "vector": np.ones(64, np.float32)}


@pytest.mark.parametrize("state", [0.0, 0.031, 0.5, 1.0, 2.0, 12.0])
def test_names_read_back(state: float) -> None:
    assert is_own(own_name(state))
    assert state_per_parameter(own_name(state)) == state


def module() -> torch.nn.Module:
    return torch.nn.Linear(8, 8).to(torch.bfloat16)


SIZES: dict[str, tuple[Any, str]] = {
    "adam": (torch.optim.Adam, "own:2"),
    "momentum": (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), "own:1"),
    "plain": (lambda groups: torch.optim.SGD(groups, lr=0.1), "own:0"),
    "adafactor": (torch.optim.Adafactor, "own:0.031"),
    "of half": (torch.optim.RMSprop(module().parameters()), "own:1"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_trial_step_tells_what_torch_keeps(name: str) -> None:
    optimizer, wanted = SIZES[name]
    assert name_of_optimizer(optimizer) == wanted


def test_groups_count_by_their_size() -> None:
    model = torch.nn.Linear(3, 9)  # 27 with momentum and 9 without
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "momentum": 0.9},
        {"params": [model.bias]},
    ]
    assert name_of_optimizer(torch.optim.SGD(groups, lr=0.1)) == "own:0.75"


def test_shapes_tell_what_optax_keeps() -> None:
    shapes = jax.eval_shape(lambda: PARAMS)
    assert name_of_optimizer(optax.adamw(1e-3), shapes) == "own:2"
    assert name_of_optimizer(optax.sgd(0.1, momentum=0.9), PARAMS) == "own:1"
    factored = name_of_optimizer(optax.adafactor(1e-3, min_dim_size_to_factor=8), PARAMS)
    assert 0 < state_per_parameter(factored) < 0.1


def test_the_plan_prices_it_and_is_loaded_with_it_alone(tmp_path: Path) -> None:
    def made(name: str, optimizer: Any) -> Any:
        return autopar.plan(
            Words(), words(4), cluster(1), folder=tmp_path / name, optimizer=optimizer
        )

    model = Words()
    own = made("own", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    priced = [
        plan.plan.prediction.memory_bytes.optimizer
        for plan in (made("sgd", "sgd"), own, made("adamw", "adamw"))
    ]
    assert priced[0] == 0
    assert 2 * priced[1] == priced[2]
    with pytest.raises(UserError, match=r"\(own:1\): give it to load too"):
        autopar.load(own, model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = autopar.load(own, model=model, optimizer=optimizer)
    assert trainer.step(words(4)) > 0


def test_what_is_no_optimizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a step on a small matrix fails"):
        autopar.plan(Words(), words(4), cluster(1), folder=tmp_path, optimizer=lambda groups: 3)
    with pytest.raises(UserError, match="choose adamw or sgd"):
        autopar.plan(Words(), words(4), cluster(1), folder=tmp_path, optimizer="adam")
