"""Which weights may be gathered in 8 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.frontends.pytorch import capture
from autopar.nouns.graph import DTYPE_BYTES, Graph
from autopar.nouns.plan import key
from autopar.nouns.recipes import GATHERED, MOVED_BYTES
from autopar.rules.narrow import with_recipes
from autopar.rules.narrow_gathers import gathers_narrow, names_of_narrow, narrow_weights
from autopar.rules.narrow_layers import narrow_layers

V, D = 64, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.twice, self.measured = nn.Linear(D, D), nn.Linear(D, D)
        self.frozen = nn.Linear(D, D).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(x))) + self.frozen(x)
        z = self.twice(self.twice(y)) + self.measured(x)
        out: torch.Tensor = x + z * self.measured.weight.mean()
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.before = nn.Linear(D, D)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.before(numbers)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def by(text: str, only: str = "") -> Graph:
    """The graph whose layers, or those whose op keys end so, run by a recipe."""
    ids, numbers = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, D)
    workload = autopar.Workload(model=Model, batch=lambda: {"ids": ids, "numbers": numbers})
    graph = capture(workload).graph
    able = [name for name, stays in narrow_layers(graph) if stays is None and name.endswith(only)]
    return with_recipes(graph, dict.fromkeys(able, text))


def of_layers(*names: str) -> frozenset[str]:
    return frozenset(f"layers.{i}.{name}.weight" for i in range(3) for name in names)


def test_those_that_one_layer_reads_by_one_scale() -> None:
    by_tensor = names_of_narrow(by("fp8-tensor"))
    assert by_tensor == {"before.weight", *of_layers("up", "down")}
    for recipe in ("fp8-row", "fp8-block", "mxfp8"):
        assert not gathers_narrow(recipe)
        assert names_of_narrow(by(recipe)) == frozenset()
    assert gathers_narrow("fp8-tensor")
    assert not gathers_narrow(None)


def test_both_products_that_read_a_weight_are_narrow() -> None:
    assert names_of_narrow(by("fp8-tensor:output+input")) == names_of_narrow(by("fp8-tensor"))
    assert names_of_narrow(by("fp8-tensor:input+weight")) == frozenset()
    # Of what comes from the batch nobody wants a gradient.
    assert names_of_narrow(by("fp8-tensor:output+weight")) == {"before.weight"}


def test_of_a_part_they_have_its_own_names() -> None:
    graph = by("fp8-tensor", only=key("Layer", "up/linear"))
    assert narrow_weights(graph) == frozenset()
    (block,) = graph.blocks.values()
    assert narrow_weights(block.body) == {"up.weight"}


def test_no_tensor_of_a_graph_is_so() -> None:
    """A model that casts to 8 bits itself is refused as before: a cast is no rounding to rules."""
    assert GATHERED not in DTYPE_BYTES
    assert MOVED_BYTES[GATHERED] == 1
