# mypy: disable-error-code="no-any-return"
"""Models whose modules and parameters have names that no attribute of Python can have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

WIDTH = 8
NAMES = (
    "class", "a-b", "0", "a b", "größe", "日本", "self", "A_B", "a_b", "None", "none", "weight",
    "x/y", "a::b", 'q"uote', "it's", "back\\slash", "new\nline", "tab\t", "µ", "ﬁ", "__w", "x²",
    "{i}", "#", "a # 1", "%s", "for", "*", "1,5", "Tensor", "Stage", "F", "\u0661",
)  # fmt: skip


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + x


class Named(nn.Module):
    """Under each of ``names``: a layer, a module, a parameter of a dict, one beside modules, and a
    parameter and a buffer of its own. ``NAMES`` with those of a dict too."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH) for n in names})
        self.parts = nn.ModuleDict({n: Part() for n in names})
        self.scales = nn.ParameterDict({n: nn.Parameter(torch.randn(WIDTH)) for n in names})
        self.row = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.mixed = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH, WIDTH)])
        self.beside = nn.Module()
        self.beside.add_module("items", Part())
        for n in names:
            self.beside.add_module(n, nn.Linear(WIDTH, WIDTH))
            self.beside.register_parameter(f"{n}+", nn.Parameter(torch.randn(WIDTH)))
            self.register_parameter(f"{n}!", nn.Parameter(torch.randn(WIDTH)))
            self.register_buffer(f"{n}?", torch.randn(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for n in self.names:
            x = torch.tanh(self.layers[n](x)) * self.scales[n] + self.parts[n](x)
            beside = self.beside.get_submodule(n)(x) * getattr(self.beside, f"{n}+")
            x = torch.tanh(x + beside * getattr(self, f"{n}!") + getattr(self, f"{n}?"))
        for weight in self.row:
            x = torch.tanh(x @ weight)
        x = self.beside.get_submodule("items")(x) * self.mixed[0] @ self.mixed[1]
        return self.last(x).square().mean()


class Layered(nn.Module):
    """Repeated layers with odd names inside, and odd names around them."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("the layers", nn.ModuleList(Named(("a-b", "class")) for _ in range(2)))
        self.first = nn.ModuleDict({"2": Part(), "in-side": Part()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first["in-side"](self.first["2"](x))
        losses = [layer(x) for layer in self.get_submodule("the layers").children()]
        return losses[0] + losses[1]


class Chain(nn.Module):
    """Layers that stages can be cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("in-put", nn.Linear(WIDTH, WIDTH))
        self.add_module("the layers", nn.ModuleList(Cell() for _ in range(4)))

    def forward(self, x: Tensor, inputIds: Tensor) -> Tensor:
        x = self.get_submodule("in-put")(x) * inputIds
        for layer in self.get_submodule("the layers").children():
            x = layer(x)
        return x.square().mean()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(WIDTH)) for _ in range(2))
        self.named = nn.ParameterDict({"a-b": torch.ones(WIDTH), "class": torch.ones(WIDTH)})
        self.parts = nn.ModuleDict({"for": Part(), "größe": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight, name in zip(self.weights, ("a-b", "class"), strict=True):
            x = torch.tanh(x @ weight) * self.named[name]
        return x + self.parts["größe"](self.parts["for"](x))


def batch(step: int = 0) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, WIDTH, generator=draws)}


def two(step: int = 0) -> dict[str, Tensor]:
    return {**batch(step), "inputIds": batch(step + 100)["x"]}


named = autopar.Workload(model=partial(Named, NAMES[:6]), batch=batch)
layered = autopar.Workload(model=Layered, batch=batch)
chain = autopar.Workload(model=Chain, batch=two)
