"""Branches that skip what has no rows are taken; what else depends on them is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import CaptureError
from autopar.runtime.jobs.launch import verify_many
from benchmarks.planned import planned_in
from tests.frontends.torch_referee import compare
from tests.plans import cluster_text
from tests.sampling import some

MODEL = '''
import torch
from torch import nn
import autopar


class Experts(nn.Module):
    """No token ever goes to the third of four; each goes on in another way."""

    def __init__(self):
        super().__init__()
        self.gate, self.two = nn.Linear(16, 2), nn.Linear(16, 4)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x):
        shape = x.shape
        x = x.flatten(0, 1)
        chosen = self.gate(x).argmax(-1) * 3
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                y[mask] = expert(x[mask])
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if not mask.any():
                continue
            y[mask] += expert(x[mask]).tanh()
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.sum() == 0:
                continue
            (rows,) = torch.where(mask)
            y.index_add_(0, rows, expert(x[mask]).sin())
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.sum() > 0:
                rows = mask.nonzero().squeeze(1)
                y = y.index_add(0, rows, expert(x[mask]).cos())
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero(as_tuple=True)[0]
            if rows.numel() == 0:
                continue
            y[rows] += expert(x[rows]).sigmoid()
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if rows.shape[0] > 0:
                y[rows] = y[rows] * expert(x[rows]).atan()
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any() or (chosen == 9).any():
                y[mask] = expert(x[mask]).cosh() + y[mask]
        for i, expert in enumerate(self.experts):
            y[chosen == i] = expert(x[chosen == i]).erf() + y[chosen == i]
        weights, two = self.two(x).softmax(-1).topk(2, -1)
        counts = torch.bincount(two.flatten(), minlength=4).tolist()
        for i, expert in enumerate(self.experts):  # as DeepSeek-V3 has it
            if counts[i] == 0:
                continue
            rows, place = torch.where(two == i)
            y[rows] += expert(x[rows]) * weights[rows, place, None]
        counts = two.view(-1).bincount(minlength=4)
        for i, expert in enumerate(self.experts):
            if counts[i] > 0:
                rows, place = (two == i).nonzero(as_tuple=True)
                y[rows] = weights[rows, place].unsqueeze(-1) * expert(x[rows]).sin() + y[rows]
        share = counts / counts.sum() * torch.bincount(two[:, 0], weights[:, 0].detach(), 4)
        y = y * (1 + share.mean())
        for expert in self.experts:  # else one of them has no gradient on one device
            y = y + expert(x).sigmoid()
        return y.view(shape)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Experts() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


workload = autopar.Workload(model=Model, batch=lambda: {"x": torch.randn(4, 8, 16)})
'''


@pytest.mark.gloo(2)
def test_rows_of_branches_that_run_for_none_are_as_they_were(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    layouts = {"data": {"dp_replicate": "2"}, "tensor": {"tp": "2"}}
    layouts = {name: layouts[name] for name in some(layouts, 1)}
    folders, refused = planned_in(f"{model}:workload", tmp_path, layouts, str(cluster))
    assert not refused
    assert all(verified.passed for verified in verify_many(list(folders.values())))


def a_number(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    if mask.any():
        y[mask] = 1.0
    return y


def one_row(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    if mask.any():
        y[mask] = x.mean(0).cos()
    if mask.sum() > 0:
        y[mask, :] = x[0]
    return y


def filled(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    if mask.any():
        y = y.masked_fill(mask.unsqueeze(-1), 2.0)
    return y


def selected(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    if mask.any():
        y = torch.where(mask.unsqueeze(-1).expand_as(y), x.cos(), y)
    return y


@pytest.mark.parametrize("function", [a_number, one_row, filled, selected])
def test_what_is_chosen_by_the_mask_alone(function: Callable[..., Tensor]) -> None:
    """Of a mask that chooses some rows, and of one that chooses none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return function(self.linear(x), mask).square().mean()

    for least in (2, 9):
        mask = torch.arange(4) >= least
        batch = {"x": torch.randn(4, 16), "mask": mask}
        assert compare(autopar.Workload(model=Model, batch=lambda b=batch: b)).worst < 1e-12


def selected_otherwise(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    if mask.any():
        y = torch.where(mask.unsqueeze(-1), y, x.cos())
    return y


def filled_by_another(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    if mask.any():
        y = y.masked_fill(~mask.unsqueeze(-1), 2.0)
    return y


def counted(x: Tensor, mask: Tensor) -> Tensor:
    y, n = torch.zeros_like(x), 1
    if mask.any():
        y[mask] = x[mask].sin()
        n += 1
    return y / n


def added(x: Tensor, mask: Tensor) -> Tensor:
    y = x.mean()
    if mask.any():
        y = y + x[mask].mean()
    return y


def of_another_mask(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    if mask.any():
        other = ~mask
        y[other] = x[other].sin()
    return y


def either(x: Tensor, mask: Tensor) -> Tensor:
    y, other = torch.zeros_like(x), x.mean(1) > 0.7
    if mask.any() or other.any():
        y[other] = x[other].sin()
    return y


def both(x: Tensor, mask: Tensor) -> Tensor:
    y, other = torch.zeros_like(x), x.mean(1) > 0.7
    if mask.any() and other.any():
        y[mask] = x[mask].sin()
    return y


def another_tensor(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    if mask.any():
        y = x
    return y


def on_another_tensor(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    (rows,) = torch.where(mask)
    if mask.any():
        y = x.index_add(0, rows, x[mask].sin())
    return y


def written_elsewhere(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    z = y.view(-1)
    if mask.any():
        z[0] = 1.0
    return y + x


def in_a_list(x: Tensor, mask: Tensor) -> Tensor:
    parts = [x]
    if mask.any():
        parts.append(x[mask])
    return torch.cat(parts)


def otherwise(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    if mask.any():
        y[mask] = x[mask].sin()
    else:
        y = x.cos()
    return y


def all_of_them(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    if mask.all():
        y[mask] = x[mask].sin()
    return y


def of_numbers(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    if x.sum() > 0:
        y[mask] = x[mask].sin()
    return y


def by_how_many_of_another(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    rows = mask.nonzero(as_tuple=True)[0]
    if rows.numel() > 0:
        other = x.mean(1) > 0.7
        y[other] = x[other].sin()
    return y


def by_two_rows(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    rows = mask.nonzero(as_tuple=True)[0]
    if rows.numel() > 1:
        y[rows] = x[rows].sin()
    return y


def of_none(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    rows = mask.nonzero(as_tuple=True)[0]
    if rows.numel() == 0:
        y = y + x.mean()
    return y


def the_other_way(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    if not mask.any():
        y[mask] = x[mask].sin()
    return y


def by_another_bin(x: Tensor, mask: Tensor) -> Tensor:
    y, best = torch.zeros_like(x), x.argmax(-1)
    if best.bincount(minlength=16)[1] > 0:
        (rows,) = torch.where(best == 2)
        y[rows] += x[rows].sin()
    return y


def by_two_in_a_bin(x: Tensor, mask: Tensor) -> Tensor:
    y, best = torch.zeros_like(x), x.argmax(-1)
    if best.bincount(minlength=16)[2] > 1:
        (rows,) = torch.where(best == 2)
        y[rows] += x[rows].sin()
    return y


def by_a_bin_of_others(x: Tensor, mask: Tensor) -> Tensor:
    y, best = torch.zeros_like(x), x.argmax(-1)
    if x.argmin(-1).bincount(minlength=16)[2] > 0:
        (rows,) = torch.where(best == 2)
        y[rows] += x[rows].sin()
    return y


REFUSED = (
    selected_otherwise, filled_by_another,
    by_another_bin, by_two_in_a_bin, by_a_bin_of_others,
    either, both,
    counted, added, of_another_mask, another_tensor, on_another_tensor, written_elsewhere,
    in_a_list, otherwise, all_of_them, of_numbers, the_other_way, by_how_many_of_another,
    by_two_rows, of_none,
)  # fmt: skip


@pytest.mark.parametrize("function", REFUSED)
def test_what_differs_where_no_row_is_chosen_is_refused(function: Callable[..., Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.weight
            return function(x, x.mean(1) > 0.5).square().mean()

    def batch() -> dict[str, Any]:
        return {"x": torch.randn(4, 16)}

    with pytest.raises(CaptureError, match=r"decides by the value|needs the value|\.append"):
        capture(autopar.Workload(model=Model, batch=batch))


def test_a_parameter_that_is_clamped_in_it_is_refused() -> None:
    """Limits that the forward writes stand ahead of the step, whatever a mask chooses."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            held, mask = self.weight.data, x.mean(1) > 0
            if mask.any():
                held.clamp_(-1, 1)
            return (x * self.weight).square().mean()

    with pytest.raises(CaptureError, match=r"decides by the value.*it writes into a parameter"):
        capture(autopar.Workload(model=Model, batch=lambda: {"x": torch.randn(4, 16)}))
