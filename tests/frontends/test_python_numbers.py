"""Numbers that Python takes out of tensors, and computes with."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import CaptureError
from tests.frontends.torch_referee import compare

B, S, D = 3, 4, 6
Loss = Callable[[Any, Any, Any], Any]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("steps", torch.tensor(3))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, self.linear(x), labels)  # type: ignore[no-any-return]


def workload(loss: Loss) -> autopar.Workload:
    def batch() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(-2, D, (B, S), generator=generator).clamp(min=-1)
        return {"x": torch.randn(B, S, D, generator=generator), "labels": labels}

    return autopar.Workload(model=lambda: Model(loss), batch=batch)


def counted(model: Any, x: Any, labels: Any) -> Any:
    n = (labels >= 0).sum().item()
    total = (x.square().sum(-1) * (labels >= 0)).sum()
    return total / max(n, 1) + total / n**0.5 + 0.1 * (n - 1) * total


def scaled(model: Any, x: Any, labels: Any) -> Any:
    heat = model.temperature.detach()
    scale = min(heat.exp().item(), 1.2)
    return (x * scale).square().mean() + float(heat) * x.sum() / scale


def warmed(model: Any, x: Any, labels: Any) -> Any:
    share = min(1.0, float(model.steps) / 1000)
    weight = max(0.1, 1 - int(model.steps) * 1e-3, share)
    return share * x.square().mean() + weight * x.abs().mean()


def truncated(model: Any, x: Any, labels: Any) -> Any:
    n = int(x.abs().sum() * 2)
    return x.square().sum() / n


def of_two(model: Any, x: Any, labels: Any) -> Any:
    return max(x.mean(), x.square().mean(), 0.01) + min(x.sum(), 5)


def listed(model: Any, x: Any, labels: Any) -> Any:
    return x.mean() * sum(labels[0].tolist())


@pytest.mark.parametrize("loss", [counted, scaled, warmed, truncated, of_two, listed])
def test_numbers(loss: Loss) -> None:
    assert compare(workload(loss)).worst < 1e-12


def branches(model: Any, x: Any, labels: Any) -> Any:
    n = (labels >= 0).sum().item()
    return x.mean() if n > 3 else x.sum()


def counts_to(model: Any, x: Any, labels: Any) -> Any:
    for _ in range(int((labels >= 0).sum())):
        x = x.sin()
    return x.mean()


def sized(model: Any, x: Any, labels: Any) -> Any:
    return x[: (labels[0] >= 0).sum().item()].mean()


def computed_by_python(model: Any, x: Any, labels: Any) -> Any:
    return x.mean() * math.log(model.temperature.detach().item())


@pytest.mark.parametrize("loss", [branches, counts_to, sized, computed_by_python])
def test_numbers_that_python_must_know(loss: Loss) -> None:
    with pytest.raises(CaptureError, match=r"value|number"):
        capture(workload(loss))


def test_names_are_as_before() -> None:
    capture(workload(scaled))
    assert max is builtins.max
    assert max(1, 2) == 2
    assert "float" not in globals()
    assert "int" not in globals()
