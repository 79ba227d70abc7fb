"""Autocast inside a forward: its casts stand in the graph, or it is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

B, D = 8, 6
HALF = torch.bfloat16
Body = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.first(x)).float().square().mean(-1).mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(B, D)}


def _plain(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        return torch.softmax(m.layers[0].up(h) @ h.mT, -1) @ h


def _island(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        h = m.layers[0].up(h)
        with torch.autocast("cpu", enabled=False):
            h = m.layers[0].down(h.float())
        return m.layers[1].up(m.norm(h)) + h  # type: ignore[no-any-return]


def _layers(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        for layer in m.layers:
            h = layer(h)
    return h


def _one_layer_in(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        h = m.layers[0](h)
    return m.layers[1](h.float())  # type: ignore[no-any-return]


def _promoted(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        return torch.cat((m.layers[0].up(h), h), -1)


def _losses(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        return F.mse_loss(m.layers[0].up(h), h.detach(), reduction="none")


BODIES = [_plain, _island, _layers, _one_layer_in, _promoted, _losses]


def _dtypes(graph: Graph) -> list[str]:
    """Of the results of products, in order; those of blocks at each call."""
    dtypes = []
    for op in graph.ops:
        if op.kind == "block":
            dtypes += _dtypes(graph.blocks[op.attrs["block"]].body)
        elif op.kind in ("linear", "matmul"):
            dtypes.append(graph.tensors[op.outputs[0]].dtype)
    return dtypes


class _Seen(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (F.linear, torch.Tensor.matmul, torch.Tensor.__matmul__):
            self.dtypes.append(str(made.dtype).removeprefix("torch."))
        return made


@pytest.mark.parametrize("body", BODIES)
def test_casts_of_autocast(body: Body) -> None:
    """Products are in the dtypes in which torch computes them, and the program is right."""
    torch.manual_seed(0)
    model = Model(body)
    captured = capture_of(lambda: copy.deepcopy(model), batch)
    with _Seen() as seen:
        model(**batch())
    assert _dtypes(captured.graph) == seen.dtypes
    assert "bfloat16" in seen.dtypes
    made = emitted(captured, random_stage(captured, Mesh.parse("dp_shard=2 x tp=2"), 1, 0))
    check(made, model, batch(), issued=False)


def test_autocast_of_a_device_that_is_not_here() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=HALF):
            return h * 2

    with pytest.raises(UnsupportedOpError, match=r"x\.device\.type"):
        capture_of(lambda: Model(body), batch)


@torch.amp.autocast("cuda", enabled=False)  # type: ignore[untyped-decorator]
def _turned(h: Tensor) -> Tensor:
    """As libraries have it around the angles of rotary embeddings."""
    return h.float().cos() * h


with warnings.catch_warnings(action="ignore"):  # that its name is another one now

    @torch.cuda.amp.autocast(False)  # type: ignore[untyped-decorator]
    def _turned_by_place(h: Tensor) -> Tensor:
        return h.float().cos() * h


@pytest.mark.parametrize("function", [_turned, _turned_by_place])
def test_decorators_that_turn_autocast_of_a_device_off(
    function: Callable[[Tensor], Tensor],
) -> None:
    model = Model(lambda m, h: function(h))
    captured = capture_of(lambda: copy.deepcopy(model), batch)
    made = emitted(captured, random_stage(captured, Mesh.parse("dp_shard=2 x tp=2"), 1, 0))
    check(made, model, batch(), issued=False)


def test_decorators_that_turn_it_on() -> None:
    with warnings.catch_warnings(action="ignore"):  # that there is no such device

        @torch.amp.autocast("cuda", dtype=HALF)  # type: ignore[untyped-decorator]
        def narrow(h: Tensor) -> Tensor:
            return h * 2

    def body(m: Any, h: Tensor) -> Tensor:
        small: Tensor = narrow(h)
        return small

    with pytest.raises(UnsupportedOpError, match=r"x\.device\.type"):
        capture_of(lambda: Model(body), batch)
