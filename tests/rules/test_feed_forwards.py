"""Which ops of a model are a feed-forward part, and the graph in which these are one op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontends.dispatch import capture
from autopar.nouns.graph import Graph, Op
from autopar.nouns.graph import Tensor as NounTensor
from autopar.rules.feed_forwards import (
    KIND,
    FeedForward,
    NoFeedForward,
    every_feed_forward,
    with_mlp_chunks,
)
from autopar.rules.flops import flops
from autopar.rules.gates import Step
from autopar.rules.registry import bind

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


def narrow_then_wide(self: Part, x: Tensor) -> Any:
    return self.down(F.gelu(self.up(x)).double())


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


class Deep(nn.Module):
    """Three layers: the second is the last of one part, or the first of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.c(F.gelu(self.b(F.relu(self.a(x))))), y)


def test_a_product_is_of_one_part() -> None:
    batch = {"x": torch.randn(4, 6, WIDTH), "y": torch.randn(4, 6, WIDTH)}
    graph = capture(autopar.Workload(model=Deep, batch=lambda: batch)).graph
    made = with_mlp_chunks(graph, 2)
    assert [op.kind for op in made.ops if op.kind in (KIND, "linear")] == [KIND, "linear"]
    made.consumers()  # nothing that is gone is read
    one, other = (each for _, each in every_feed_forward(graph))
    assert isinstance(one, FeedForward)
    assert isinstance(other, NoFeedForward)
    assert "the last of another part" in other.reason


def test_backward_work_is_that_of_the_plain_ops() -> None:
    """A product for each gradient that there is, whatever is frozen."""
    for frozen in range(16):
        asked = [not frozen >> i & 1 for i in range(4)]
        shapes = [(6, 8), (16, 8), (16, 8), (4, 16)]
        x, gate, up, down = (
            NounTensor(str(i), shape, "float32", "parameter" if i else "activation", asks)
            for i, (shape, asks) in enumerate(zip(shapes, asked, strict=True))
        )
        hidden = any(asked[:3])
        out = NounTensor("out", (6, 4), "float32", differentiable=any(asked))
        made = NounTensor("h", (6, 16), "float32", differentiable=hidden)
        plain = 0.0
        for operands, result in (((x, gate), made), ((x, up), made), ((made, down), out)):
            op = Op("linear", tuple(t.name for t in operands), (result.name,))
            tensors = {t.name: t for t in (*operands, result)}
            plain += flops(bind(op, tensors), op, tensors)[1]
        gates: tuple[Step, ...] = (("silu", (0,), {}), ("mul", (2, 1), {}))
        attrs = {"ups": 2, "biases": (), "gate": gates, "transposed": False, "chunks": 2}
        op = Op(KIND, ("0", "1", "2", "3"), ("out",), attrs)
        tensors = {t.name: t for t in (x, gate, up, down, out)}
        own = flops(bind(op, tensors), op, tensors)[1]
        # plain products take what the hidden tensors ask for, not each of them
        assert own <= plain * (1 + 1e-9)
        if asked[0] or (asked[1] and asked[2]) or not hidden:
            assert own == pytest.approx(plain)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (normed, "layer_norm stands before it"),
        (dropped, "dropout stands before it"),
        (read_twice, "is read elsewhere too"),
        (of_two, "of several tensors"),
        (scaled, "which no product made"),
        (straight, "nothing stands between"),
        (narrow_then_wide, "several dtypes"),
    ],
)
def test_parts_that_are_none_say_why(of: Any, reason: str) -> None:
    graph = graph_of(of)
    every = [each for _, each in every_feed_forward(graph)]
    assert not any(isinstance(each, FeedForward) for each in every)
    reasons = [each.reason for each in every if isinstance(each, NoFeedForward)]
    assert any(reason in one for one in reasons)
    assert with_mlp_chunks(graph, 2) == graph
