"""Loops over the experts that were hit, and what in them must be refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import CaptureError
from tests.frontends.torch_referee import compare

EXPERTS, D = 4, 8
Loop = Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor]


class Routed(nn.Module):
    """Only two of four experts are ever chosen; all of them have gradients."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        scores = self.gate(x).softmax(-1)
        weights, chosen = (scores * torch.tensor([1.0, 0.0, 1.0, 0.0])).topk(1, dim=-1)
        y = self.loop(self.experts, x, chosen, weights)
        for expert in self.experts:
            y = y + expert(x).sigmoid()
        return y.square().mean()


class Layers(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed(loop) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)  # type: ignore[no-any-return]


def workload(loop: Loop, make: type[nn.Module] = Routed) -> autopar.Workload:
    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(2, 6, D, generator=torch.Generator().manual_seed(0))}

    return autopar.Workload(model=lambda: make(loop), batch=batch)


def with_index_add(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for number in hit:
        expert = experts[number]
        place, rows = torch.where(mask[number].squeeze(0))
        now = expert(x[None, rows].reshape(-1, D)) * weights[rows, place, None]
        y.index_add_(0, rows, now)
    return y


def with_numbers(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
        hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
    for number in hit:
        number = number[0]
        if number == EXPERTS:
            continue
        place, rows = torch.where(mask[number])
        now = experts[number](x[rows]) * weights[rows, place, None]
        y.index_add_(0, rows, now.to(y.dtype))
    return y


def by_one_number(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    mask = (chosen == torch.arange(EXPERTS)).T
    for number in mask.any(1).nonzero().squeeze(1):
        y[mask[number]] += experts[number](x[mask[number]])
    return y


@pytest.mark.parametrize("loop", [with_index_add, with_numbers, by_one_number])
def test_rounds_of_experts_that_are_hit(loop: Loop) -> None:
    assert compare(workload(loop)).worst < 1e-12
    compared = compare(workload(loop, Layers))
    assert compared.worst < 1e-12
    (block,) = compared.captured.graph.blocks.values()
    assert len(block.units) == 3


def counts(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y, count = torch.zeros_like(x), 0
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        _, rows = torch.where(mask[number].squeeze(0))
        y.index_add_(0, rows, experts[number](x[rows]))
        count += 1
    return y / count


def last_expert(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        expert = experts[number]
        _, rows = torch.where(mask[number].squeeze(0))
        y.index_add_(0, rows, expert(x[rows]))
    return expert(y)  # type: ignore[no-any-return]


def all_rows(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        y = y + experts[number](x)
    return y


def next_rows(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
    hit = torch.greater(mask[:EXPERTS].sum(dim=(-1, -2)), 0).nonzero()
    for number in hit:
        _, rows = torch.where(mask[number + 1].squeeze(0))
        y.index_add_(0, rows, experts[number](x[rows]))
    return y


def of_one_slot(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The sum is of less than what is chosen."""
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask[:, :, :5].sum(dim=(-1, -2)), 0).nonzero():
        _, rows = torch.where(mask[number].squeeze(0))
        y.index_add_(0, rows, experts[number](x[rows]))
    return y


def below_zero(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A sum of what may be below zero is zero for other reasons."""
    y = torch.zeros_like(x)
    mask = (F.one_hot(chosen, EXPERTS) - 1).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        _, rows = torch.where(mask[number].squeeze(0))
        y.index_add_(0, rows, experts[number](x[rows]))
    return y


def breaks(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        _, rows = torch.where(mask[number].squeeze(0))
        y.index_add_(0, rows, experts[number](x[rows]))
        break
    return y


def as_list(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    hit = list(torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero())
    return experts[0](x) * len(hit)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "loop", [counts, last_expert, all_rows, next_rows, of_one_slot, below_zero, breaks, as_list]
)
def test_rounds_that_leave_more_behind(loop: Loop) -> None:
    with pytest.raises(CaptureError):
        capture(workload(loop))
