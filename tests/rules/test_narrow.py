"""Which layers may run in 8 bits, which of their products at a local shape, what is joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.frontends.pytorch import capture
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.recipes import PRODUCTS, RECIPES, Narrow
from autopar.rules.narrow import (
    OPEN,
    RECIPE,
    Local,
    joined_axes,
    joins,
    local_of,
    opened,
    possible,
    with_recipes,
)
from autopar.rules.narrow_layers import narrow_layers
from autopar.rules.registry import bind
from autopar.rules.strategies import Strategy

V, D = 64, 32


class Layer(nn.Module):
    """A gate to two experts beside an MLP, of which one product is too thin."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(D), nn.Linear(D, 16)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.thin = nn.Linear(D, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.router(x).softmax(-1).topk(2, -1).values.sum(-1, keepdim=True)
        y = self.down(F.gelu(self.up(self.norm(x))))
        out: torch.Tensor = x + y * best + self.thin(x).sum(-1, keepdim=True)
        return out


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.before = nn.Linear(D, D)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.before(self.words(ids))
        x = x + F.linear(x, self.words.weight).relu().sum(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.fixture(scope="module")
def graph() -> Graph:
    def batch() -> dict[str, Any]:
        return {"ids": torch.zeros(4, 16, dtype=torch.long)}

    return capture(autopar.Workload(model=Model, batch=batch)).graph


def test_which_stay_and_why(graph: Graph) -> None:
    stays = {name: stay and str(stay) for name, stay in narrow_layers(graph)}
    assert stays == {
        "Layer::router/linear": "a router",
        "Layer::up/linear": None,
        "Layer::down/linear": None,
        "Layer::thin/linear": "16 does not divide both dims of its weight, 8 x 32",
        "before/linear": None,
        "linear": "its weight is an embedding too",
        "head/linear": "the head",
    }


def test_opened_and_named(graph: Graph) -> None:
    made, stay = opened(graph, "fp8-row")
    assert stay.keys() == {n for n, why in narrow_layers(graph) if why is not None}
    ops = [*made.ops, *made.blocks["Layer"].body.ops]
    assert {op.name for op in ops if OPEN in op.attrs} == {
        "before/linear", "up/linear", "down/linear",
    }  # fmt: skip
    named = with_recipes(graph, {"Layer::up/linear": "fp8-row:output"})
    attrs = {op.name: op.attrs for op in named.blocks["Layer"].body.ops}
    assert attrs["up/linear"][RECIPE] == "fp8-row:output"
    assert RECIPE not in attrs["down/linear"]
    assert with_recipes(graph, None) is graph
    for wrong in ("head/linear", "Layer::nowhere/linear"):
        with pytest.raises(KeyError, match=wrong):
            with_recipes(graph, {wrong: "fp8-row"})


def local(graph: Graph, text: str, mesh: Mesh, name: str = "up/linear") -> Local:
    body = graph.blocks["Layer"].body
    op = next(op for op in body.ops if op.name == name)
    return local_of(op, bind(op, body.tensors), Strategy.parse(text), mesh)


MESH = Mesh(("dp_shard", "cp", "tp"), (2, 2, 2))


def test_local_shapes(graph: Graph) -> None:
    whole = local(graph, "whole", MESH)
    assert (whole.rows, whole.n, whole.k, whole.run) == (64, 64, 32, 64)
    assert str(whole) == "64 x 32 by 32 x 64"
    split = local(graph, "dp_shard:e0 cp:e1 tp:n", MESH)
    assert (split.rows, split.n, split.k) == (16, 32, 32)
    assert split.axes == {"rows": ("cp",), "n": ("tp",), "k": ()}
    assert split.run == 8  # of one sample's tokens
    assert local(graph, "dp_shard:e0", MESH).run == 32
    assert local(graph, "tp:k", MESH).axes["k"] == ("tp",)


ALL = (True, True)


def may(local: Local, recipe: str, strategy: str = "whole", wanted: Any = ALL) -> tuple[str, ...]:
    return possible(local, Narrow(RECIPES[recipe]), Strategy.parse(strategy), wanted)


def sized(rows: int, n: int, k: int, **changes: Any) -> Local:
    given: dict[str, Any] = {"axes": dict.fromkeys(("rows", "n", "k"), ()), "even": True}
    return Local(rows, n, k, **{**given, "run": rows, **changes})


def test_what_may_be_narrow() -> None:
    assert may(sized(64, 32, 48), "fp8-row") == PRODUCTS
    assert may(sized(64, 32, 48), "fp8-row", wanted=(False, True)) == ("output", "weight")
    assert may(sized(60, 32, 48), "fp8-row") == ("output", "input")  # rows that 16 does not divide
    assert may(sized(64, 32, 40), "fp8-tensor") == ()
    assert may(sized(64, 32, 48, even=False), "fp8-row") == ()
    assert may(sized(64, 32, 48), "fp8-row", "tp:D") == ("output",)
    assert may(sized(64, 32, 48), "fp8-row", "tp:P") == ()


def test_blocks_lie_on_one_rank() -> None:
    assert may(sized(64, 32, 64), "mxfp8") == PRODUCTS
    assert may(sized(64, 48, 64), "mxfp8") == ("output", "weight")  # g has 48 along n
    assert may(sized(64, 32, 64, run=16), "mxfp8") == ("output", "input")
    along = {"rows": ("cp",), "n": (), "k": ()}
    assert may(sized(64, 32, 64, axes=along), "mxfp8") == ("output", "input")
    assert may(sized(64, 128, 128), "fp8-block") == ("output", "input")
    assert may(sized(128, 128, 192), "fp8-block") == ("weight",)  # whose blocks lie along rows
    assert may(sized(128, 128, 256), "fp8-block") == PRODUCTS


def joined(local: Local, text: str) -> list[tuple[str, str, int]]:
    pairs = joins(local, Narrow.parse(text))
    return [(direction, moved.axis, moved.size_bytes) for direction, moved in pairs]


def test_what_ranks_join() -> None:
    split = sized(64, 32, 48, axes={"rows": ("cp",), "n": ("tp",), "k": ()})
    assert joined(split, "fp8-row") == [
        ("backward", "tp", 4 * (64 + 48)),
        ("backward", "cp", 4 * (32 + 48)),
    ]
    assert joined(split, "fp8-row:output") == []
    by_tensor = [("forward", a, 8) for a in ("tp", "cp")]
    by_tensor += [("backward", a, 4) for a in ("tp", "cp")] * 2
    assert joined(split, "fp8-tensor") == by_tensor
    assert joined(split, "fp8-tensor:input") == [("backward", a, 8) for a in ("tp", "cp")]
    assert joined(split, "mxfp8") == []
    assert joined_axes(split, Narrow.parse("fp8-row:input")) == {"n": ("tp",)}
    assert joined_axes(split, Narrow.parse("fp8-tensor")) == {"n": ("tp",), "rows": ("cp",)}


@pytest.mark.parametrize("text", ["fp8-row", "mxfp8:weight", "fp8-tensor:output+weight"])
def test_text_reads_back(text: str) -> None:
    assert str(Narrow.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["fp8", "", "fp8-row:", "fp8-row:both", "fp8-row:input+output", "fp8-row:input+input"]
)
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"there are fp8-tensor|in this order"):
        Narrow.parse(text)
