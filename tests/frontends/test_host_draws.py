"""Draws from generators of Python or NumPy in a forward are refused, but where it seeds them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.pytorch import capture
from autopar.frontends.pytorch.errors import HostDrawError
from autopar.frontends.shared.generators import host_generators, state_of
from autopar.nouns.workload import Workload

OWN = np.random.default_rng(0)


class Model(nn.Module):
    """A layer as many times as is drawn."""

    def __init__(self, times: Callable[[nn.Module], int]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.times = times
        self.rng = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times(self)):
            x = torch.tanh(self.layer(x))
        return x.square().mean()


def workload(times: Callable[[nn.Module], int]) -> Workload:
    return Workload(model=lambda: Model(times), batch=lambda: {"x": torch.randn(4, 8)})


@pytest.mark.parametrize(
    ("times", "what"),
    [
        (lambda m: random.randrange(4) + 1, "draws from random at test_host_draws.py:"),
        (lambda m: 1 + (random.random() < 0.5), "draws from random at test_host_draws.py:"),
        (lambda m: int(np.random.randint(1, 5)), "draws from numpy.random at test_host_draws.py:"),
        (lambda m: m.rng.randint(1, 4), "draws from rng: "),
        (lambda m: int(OWN.integers(1, 5)), "draws from OWN: "),
    ],
)
def test_draws_are_refused(times: Callable[[nn.Module], int], what: str) -> None:
    before = [pickle.dumps(state_of(g)[1]) for g in (*host_generators().values(), OWN)]
    with pytest.raises(HostDrawError, match=r"Draw by torch") as caught:
        capture(workload(times))
    assert what in str(caught.value)
    after = [pickle.dumps(state_of(g)[1]) for g in (*host_generators().values(), OWN)]
    assert after == before


def seeded(model: nn.Module) -> int:
    np.random.seed(5)
    random.seed(5)
    return 1 + int(np.random.randint(1, 3)) + random.randrange(2)


def imports(model: nn.Module) -> int:
    """What runs once, as the import of a module that draws."""
    if not hasattr(imports, "done"):
        imports.done = random.random()  # type: ignore[attr-defined]
    return 2


@pytest.mark.parametrize("times", [seeded, imports])
def test_the_same_numbers_each_time_are_none(times: Callable[[nn.Module], int]) -> None:
    kinds = [op.kind for op in capture(workload(times)).graph.ops]
    assert kinds.count("linear") >= 2
