"""Parameters that a forward writes between limits: what of them is captured, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.pytorch import capture
from autopar.frontends.pytorch.errors import MutationError
from autopar.nouns.workload import Workload

WIDTH = 4
Write = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, write: Write, bound: float) -> None:
        super().__init__()
        self.write, self.bound = write, bound
        self.linear = nn.Linear(WIDTH, WIDTH)

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.linear.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)


class Model(nn.Module):
    def __init__(self, write: Write, ahead: Write | None, bounds: tuple[float, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(write, bound) for bound in bounds)
        self.ahead = ahead

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.ahead is None else self.ahead(self, x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def limits(
    write: Write, ahead: Write | None = None, bounds: tuple[float, ...] = (1, 1, 1, 1)
) -> dict[str, Any]:
    workload = Workload(
        model=lambda: Model(write, ahead, bounds), batch=lambda: {"x": torch.randn(2, 3, WIDTH)}
    )
    captured = capture(workload)
    assert all(op.kind != "clamp" for op in captured.graph.ops)
    return {name: t.limits for name, t in captured.tensors.items()}


def by_data(layer: Layer, x: Tensor) -> Tensor:
    layer.weight.data.clamp_(-layer.bound, layer.bound)
    layer.weight.data.clamp_(-layer.bound, layer.bound)
    made: Tensor = layer.linear(x)
    return made


def without_gradient(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.weight.clamp_(min=0)
    made: Tensor = layer.linear(x)
    return made


def of_all(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        layer.weight.data.clamp_(-layer.bound, layer.bound)
    return x


def plain(layer: Layer, x: Tensor) -> Tensor:
    made: Tensor = layer.linear(x)
    return made


@pytest.mark.parametrize("bounds", [(1, 1, 1, 1), (1, 2, 2, 1)])
@pytest.mark.parametrize(("write", "ahead"), [(by_data, None), (plain, of_all)])
def test_every_layer_has_its_own(write: Write, ahead: Any, bounds: tuple[float, ...]) -> None:
    wanted = {f"layers.{i}.linear.weight": (-bound, bound) for i, bound in enumerate(bounds)}
    captured = limits(write, ahead, bounds)
    assert {name: of for name, of in captured.items() if of is not None} == wanted


def test_one_side_may_be_open() -> None:
    assert set(limits(without_gradient).values()) == {(0, None), None}  # None: of biases
    assert set(limits(plain).values()) == {None}


def too_late(layer: Layer, x: Tensor) -> Tensor:
    return by_data(layer, layer.linear(x))


def narrower(layer: Layer, x: Tensor) -> Tensor:
    layer.weight.data.clamp_(-2, 2)
    return by_data(layer, x)


def in_part(layer: Layer, x: Tensor) -> Tensor:
    layer.weight.data[:2].clamp_(-1, 1)
    made: Tensor = layer.linear(x)
    return made


def normed(layer: Layer, x: Tensor) -> Tensor:
    layer.weight.data.div_(layer.weight.norm())
    made: Tensor = layer.linear(x)
    return made


def penalty(model: Any, x: Tensor) -> Tensor:
    weight: Tensor = model.layers[3].weight
    made: Tensor = x * weight.detach().norm()
    return made


@pytest.mark.parametrize(
    ("write", "ahead", "why"),
    [
        (too_late, None, r"'layers.0.linear.weight' what it has read or\s+written already"),
        (narrower, None, r"'layers.0.linear.weight' what it has read or\s+written already"),
        (in_part, None, "writes into parameter 'layers.0.linear.weight', which the optimizer owns"),
        (normed, None, "writes into parameter 'layers.0.linear.weight', which the optimizer owns"),
        (by_data, penalty, r"'layers.3.linear.weight' what it has read or\s+written already"),
    ],
)
def test_what_cannot_stand_ahead_is_refused(write: Write, ahead: Any, why: str) -> None:
    with pytest.raises(MutationError, match=why):
        limits(write, ahead)
