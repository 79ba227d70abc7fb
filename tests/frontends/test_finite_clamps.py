"""Clamps of what is not finite run at every step; what else asks for finite numbers is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import CaptureError, DataDependentError
from autopar.nouns.mesh import Mesh
from autopar.runtime.jobs.launch import verify_many
from benchmarks.planned import planned_in
from tests.emit.harness import emitted
from tests.emit.random_stage import random_stage
from tests.frontends.torch_interpret import interpret
from tests.plans import cluster_text

MODEL = '''
import torch
from torch import nn
import autopar


class Layer(nn.Module):
    """As transformers' DETR, its kin and older T5 have it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.up(x).relu()
        if self.training:
            if not torch.isfinite(h).all():
                clamp_value = torch.finfo(h.dtype).max - 1000
                h = torch.clamp(h, min=-clamp_value, max=clamp_value)
        h = self.down(h)
        if torch.isinf(h).any() or torch.isnan(h).any():
            limit = torch.finfo(h.dtype).max - 1000
            h = torch.clamp(h, min=-limit, max=limit)
        if self.training and (torch.isinf(h) | torch.isnan(h)).any():
            h.clamp_(torch.finfo(h.dtype).min, torch.finfo(h.dtype).max)
        if not h.isinf().logical_not().all():
            h = h.view(-1).clamp(max=torch.finfo(h.dtype).max).view_as(h)
        return x + h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


workload = autopar.Workload(model=Model, batch=lambda: {"x": torch.randn(8, 4, 16)})
'''


@pytest.mark.gloo(2)
def test_finite_tensors_stay_as_they_are(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    layouts = {
        "data": {"dp_replicate": "2", "microbatch": "2"},
        "tensor": {"tp": "2"},
    }
    folders, refused = planned_in(f"{model}:workload", tmp_path, layouts, str(cluster))
    assert not refused
    assert [verified.passed for verified in verify_many(list(folders.values()))] == [True, True]


class Asking(nn.Module):
    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(16, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return self.function(x, x.sin()).tanh().mean()


def workload_of(
    function: Callable[..., Tensor], dtype: torch.dtype = torch.float32, precision: str = "float32"
) -> autopar.Workload:
    return autopar.Workload(
        model=lambda: Asking(function, dtype),
        batch=lambda: {"x": torch.randn(4, 16, dtype=dtype)},
        precision=precision,
    )


def clamped(h: Tensor, other: Tensor, less: float = 1000) -> Tensor:
    if not torch.isfinite(h).all():
        limit = torch.finfo(h.dtype).max - less
        h = torch.clamp(h, min=-limit, max=limit)
    return h


def test_infinite_numbers_are_clamped_as_the_model_does() -> None:
    captured = capture(workload_of(clamped))
    assert any("clamps a tensor where not all of it is finite" in note for note in captured.notes)
    x = torch.randn(4, 16)
    x[1, 2], x[2, 3] = 3.4e38, -3.4e38  # twice which is infinite
    model, held = Asking(clamped, torch.float32), {"weight": torch.full((16,), 2.0)}
    held["weight"].requires_grad_()
    model.weight.data.fill_(2.0)
    loss, mine = model(x), interpret(captured.graph, held, {"x": x}, wide=False)
    (loss + mine).backward()
    assert mine == loss
    assert torch.equal(held["weight"].grad, model.weight.grad)  # type: ignore[arg-type]


def test_limits_are_those_of_the_dtype_that_a_program_computes_in() -> None:
    made = capture(workload_of(clamped, precision="bfloat16"))
    spread = random_stage(made, Mesh.parse("dp_replicate=2"), 1, 0)
    text = emitted(made, spread, precision="bfloat16").text
    assert "clamp(min=torch.finfo(torch.bfloat16).min, max=torch.finfo(torch.bfloat16).max)" in text
    capture(workload_of(clamped, torch.bfloat16))
    capture(workload_of(clamped, torch.float64, "float64"))


@pytest.mark.parametrize("precision", ["float16", "float64"])
def test_a_dtype_whose_finite_numbers_pass_the_limits_is_refused(precision: str) -> None:
    with pytest.raises(DataDependentError, match=f"{precision}.*may cut off finite.*say one"):
        capture(workload_of(clamped, precision=precision))


def test_the_limits_of_float16_are_passed_by_finite_numbers() -> None:
    with pytest.raises(DataDependentError, match=r"a clamp of that tensor at.* of float16"):
        capture(workload_of(clamped, torch.float16))


def lower(h: Tensor, other: Tensor) -> Tensor:
    return clamped(h, other, 1e35)


def another(h: Tensor, other: Tensor) -> Tensor:
    """What is clamped may be infinite where what was asked for is not."""
    if not torch.isfinite(other).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def both(h: Tensor, other: Tensor) -> Tensor:
    if not torch.isfinite(h).all() and not torch.isfinite(other).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def the_other_way(h: Tensor, other: Tensor) -> Tensor:
    if torch.isfinite(h).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def some_finite(h: Tensor, other: Tensor) -> Tensor:
    if not torch.isfinite(h).any():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def all_infinite(h: Tensor, other: Tensor) -> Tensor:
    if torch.isinf(h).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def both_at_once(h: Tensor, other: Tensor) -> Tensor:
    if (torch.isinf(h) & (other > 0)).any():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def no_numbers(h: Tensor, other: Tensor) -> Tensor:
    if torch.isnan(h).any():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def a_row(h: Tensor, other: Tensor) -> Tensor:
    if not torch.isfinite(h[0]).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def zeros(h: Tensor, other: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        h = torch.zeros_like(h)
    return h


def halved(h: Tensor, other: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max) / 2
    return h


def two(h: Tensor, other: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
        other = other * 2
    return h + other


def written_before(h: Tensor, other: Tensor) -> Tensor:
    """It is no more what was asked for."""
    finite = torch.isfinite(h).all()
    h.mul_(1e38)
    if not finite:
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    return h


def with_a_number(h: Tensor, other: Tensor) -> Tensor:
    scale = 1.0
    if not torch.isfinite(h).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
        scale = 0.5
    return h * scale


def otherwise(h: Tensor, other: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        h = torch.clamp(h, min=torch.finfo(h.dtype).min, max=torch.finfo(h.dtype).max)
    else:
        h = h * 2
    return h


REFUSED = (
    lower, another, both, the_other_way, some_finite, all_infinite, both_at_once, no_numbers, a_row,
    zeros, halved, two, written_before, with_a_number, otherwise,
)  # fmt: skip


@pytest.mark.parametrize("function", REFUSED)
def test_what_differs_for_finite_tensors_is_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"decides by the value|needs the value"):
        capture(workload_of(function))
