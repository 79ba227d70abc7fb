# mypy: disable-error-code="no-any-return"
"""Losses weighted by parameters, and what is added to them, are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.rules.batch import batch_flow
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

Body = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
B, D = 12, 8
DIMS = {"x": 0, "y": 0, "label": 0}


class Model(nn.Module):
    """Three tasks of one trunk."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.trunk, self.near, self.far = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 5)
        self.s, self.t = nn.Parameter(torch.tensor([0.3, -0.4])), nn.Parameter(torch.tensor(1.7))
        self.rho = nn.Parameter(torch.tensor([0.2, 0.5, 0.1]))
        self.fixed: Tensor
        self.register_buffer("fixed", torch.tensor([0.5, 2.0, 1.5]))

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        near, far = (self.near(h) - y).square().mean(), F.cross_entropy(self.far(h), label)
        return self.body(self, near, far, h.abs().mean())


def batch() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    x, y = (torch.randn(B, D, generator=draws) for _ in range(2))
    return {"x": x, "y": y, "label": torch.randint(0, 5, (B,), generator=draws)}


def captured_of(body: Body) -> Captured:
    return capture_of(partial(Model, body), batch)


def _uncertainty(m: Any, near: Tensor, far: Tensor, spare: Tensor) -> Tensor:
    """Kendall et al. 2018; the logarithms of variances are added once."""
    s = m.s
    return torch.exp(-s[0]) * near + s[0] + far * torch.exp(-s[1]) + s[1]


def _temperature(m: Any, near: Tensor, far: Tensor, spare: Tensor) -> Tensor:
    return (near + far) / m.t.square() + torch.log(m.t)


def _balance(m: Any, near: Tensor, far: Tensor, spare: Tensor) -> Tensor:
    tasks = torch.stack([near, far, spare])
    return (tasks * torch.softmax(m.rho, 0) * m.fixed).sum()


def _penalty(m: Any, near: Tensor, far: Tensor, spare: Tensor) -> Tensor:
    """Which a parameter that tp may split has a say in."""
    weight: Tensor = m.near.weight
    return near * m.t + 0.1 * weight.square().sum() - m.fixed.sum() * m.t


BODIES: dict[str, Body] = {f.__name__: f for f in (_uncertainty, _temperature, _balance, _penalty)}
MESHES = [
    ("1", 4),
    ("dp_replicate=2", 1),
    ("dp_replicate=2", 3),
    ("dp_replicate=2 x dp_shard=2", 3),
    ("dp_shard=2 x tp=2", 2),
]
"""And how many microbatches each rank has."""


@pytest.mark.parametrize("name", BODIES)
def test_loss_and_gradients_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(0)
    model, captured = Model(BODIES[name]), captured_of(BODIES[name])
    assert not batch_flow(captured.graph, DIMS).obstacles
    for seed, (mesh, microbatches) in enumerate(MESHES):
        spread = random_stage(captured, Mesh.parse(mesh), microbatches, seed)
        check(emitted(captured, spread, microbatches), model, batch())


@pytest.mark.parametrize(
    "body",
    [
        lambda m, near, far, spare: near * spare * m.t,
        lambda m, near, far, spare: (near * m.t) ** 2,
        lambda m, near, far, spare: torch.exp(near / m.t),
        lambda m, near, far, spare: near * far.detach(),
        lambda m, near, far, spare: m.t * near / spare,
        lambda m, near, far, spare: torch.maximum(near * m.t, m.t),
    ],
)
def test_what_is_not_linear_in_means_is_not_cut_into_microbatches(body: Body) -> None:
    """Data ranks join the means and go on whole."""
    torch.manual_seed(0)
    model, captured = Model(body), captured_of(body)
    assert "needs the whole of" in batch_flow(captured.graph, DIMS).obstacles[0]
    spread = random_stage(captured, Mesh.parse("dp_replicate=2 x dp_shard=2"), 1, 0)
    check(emitted(captured, spread), model, batch())


@pytest.mark.parametrize(
    "body",
    [
        lambda m, near, far, spare: near * torch.softmax(torch.randn(2), 0)[0],
        lambda m, near, far, spare: near * F.dropout(m.s, 0.5).sum(),
        lambda m, near, far, spare: near * m.t + m.t * torch.rand(()),
    ],
)
def test_weights_that_are_drawn_are_drawn_once(body: Body) -> None:
    """A microbatch would draw another one."""
    assert batch_flow(captured_of(body).graph, DIMS).obstacles
