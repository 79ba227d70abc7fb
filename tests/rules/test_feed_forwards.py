"""Which ops of a model are a feed-forward part, and the graph in which these are one op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontends.dispatch import capture
from autopar.nouns.graph import Graph
from autopar.rules.feed_forwards import (
    KIND,
    FeedForward,
    NoFeedForward,
    every_feed_forward,
    with_mlp_chunks,
)

WIDTH = 8


class Part(nn.Module):
    """One layer, whose middle is ``of``."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.gate = nn.Linear(WIDTH, 16, bias=False)
        self.down = nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))
        self.of = of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.of(self, x)
        return F.mse_loss(x, y)


def graph_of(of: Any) -> Graph:
    batch = {"x": torch.randn(4, 6, WIDTH), "y": torch.randn(4, 6, WIDTH)}
    return capture(autopar.Workload(model=lambda: Part(of), batch=lambda: batch)).graph


def gelu(self: Part, x: Tensor) -> Any:
    return self.down(F.gelu(self.up(x)))


def swiglu(self: Part, x: Tensor) -> Any:
    return self.down(F.silu(self.gate(x)) * self.up(x))


def squared(self: Part, x: Tensor) -> Any:
    h = F.relu(self.up(x))
    return self.down(h * h)


def flat(self: Part, x: Tensor) -> Any:
    return self.down(F.gelu(self.up(x.flatten(0, 1)))).view_as(x)


def normed(self: Part, x: Tensor) -> Any:
    return self.down(F.gelu(self.norm(self.up(x))))


def dropped(self: Part, x: Tensor) -> Any:
    return self.down(F.dropout(F.gelu(self.up(x)), 0.1))


def read_twice(self: Part, x: Tensor) -> Any:
    h = F.gelu(self.up(x))
    return self.down(h) + h.sum()


def of_two(self: Part, x: Tensor) -> Any:
    return self.down(F.silu(self.gate(x)) * self.up(x + 1))


def scaled(self: Part, x: Tensor) -> Any:
    return self.down(F.gelu(self.up(x)) * self.scale)


def straight(self: Part, x: Tensor) -> Any:
    return self.down(self.up(x))


@pytest.mark.parametrize(
    ("of", "ups", "biases", "steps"),
    [
        (gelu, 1, (0,), ["gelu"]),
        (swiglu, 2, (1,), ["silu", "mul"]),
        (squared, 1, (0,), ["relu", "mul"]),
        (flat, 1, (0,), ["gelu"]),
    ],
)
def test_parts_that_are_one(of: Any, ups: int, biases: tuple[int, ...], steps: list[str]) -> None:
    graph = graph_of(of)
    made = with_mlp_chunks(graph, 3)
    (op,) = (op for op in made.ops if op.kind == KIND)
    assert (op.attrs["ups"], op.attrs["biases"], op.attrs["chunks"]) == (ups, biases, 3)
    assert [kind for kind, _, _ in op.attrs["gate"]] == steps
    assert len(op.inputs) == 2 + ups + len(biases)
    # nobody reads what is gone, and everything else is there
    read = {name for op in made.ops for name in op.inputs}
    assert read | {*made.outputs} <= made.tensors.keys()
    gone = graph.tensors.keys() - made.tensors.keys()
    assert gone == {n for op in graph.ops for n in op.outputs} - {
        n for op in made.ops for n in op.outputs
    }
    # a bias behind the last product stays an op of its own
    assert any(other.kind == "add" and op.name in other.inputs for other in made.ops)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (normed, "layer_norm stands before it"),
        (dropped, "dropout stands before it"),
        (read_twice, "is read elsewhere too"),
        (of_two, "of several tensors"),
        (scaled, "which no product made"),
        (straight, "nothing stands between"),
    ],
)
def test_parts_that_are_none_say_why(of: Any, reason: str) -> None:
    graph = graph_of(of)
    every = [each for _, each in every_feed_forward(graph)]
    assert not any(isinstance(each, FeedForward) for each in every)
    reasons = [each.reason for each in every if isinstance(each, NoFeedForward)]
    assert any(reason in one for one in reasons)
    assert with_mlp_chunks(graph, 2) == graph
