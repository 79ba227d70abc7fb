"""Layers called in any order, and again: a program must call them in that order too."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.nouns.mesh import Mesh
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

WIDTH, LAYERS, SAMPLES = 8, 4, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(x)))
        return x + made


class InOrder(nn.Module):
    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = self.layers[place](x)
        return x.square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, LAYERS - 1), min_size=2, max_size=8).map(tuple))
@example((0, 0, 1, 1, 2, 2, 3, 3))  # was written as 0, 1, 2, 3
@example((0, 1, 2, 3, 0, 1, 2, 3))
@example((0, 0, 1, 2))
@example((0, 1, 1, 2))
def test_numbers(order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = InOrder(order)
    made = capture_of(partial(InOrder, order), batch)
    check(emitted(made, random_stage(made, Mesh.parse("dp_shard=2"), 1, 0)), model, batch())
