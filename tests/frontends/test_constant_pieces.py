"""Pieces by masks and places that are made of constants, and the first n that a mask chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import CaptureError
from tests.frontends.torch_referee import compare

D = 8
Pieces = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, function: Pieces) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.function = function

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        return self.function(self.linear(x), kinds).square().sum()


def workload(function: Pieces) -> autopar.Workload:
    def batch() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        kinds = torch.randint(0, 3, (6,), generator=generator)
        return {"x": torch.randn(6, D, generator=generator), "kinds": kinds}

    return autopar.Workload(model=lambda: Model(function), batch=batch)


def off_diagonal(x: Tensor, kinds: Tensor) -> Tensor:
    scores = x @ x.T
    scores = scores[~torch.eye(len(x), dtype=torch.bool)].view(len(x), -1)
    return scores.softmax(-1) * torch.arange(scores.shape[1])


def upper_triangle(x: Tensor, kinds: Tensor) -> Tensor:
    """Each row chooses another number of columns."""
    mask = torch.ones(len(x), len(x)).triu(1) > 0
    chosen = (x @ x.T)[mask]
    return chosen * torch.arange(len(chosen))


def selected(x: Tensor, kinds: Tensor) -> Tensor:
    scores = x @ x.T
    return torch.masked_select(scores, torch.eye(len(x)).bool()) * torch.arange(len(x))


def every_second(x: Tensor, kinds: Tensor) -> Tensor:
    rows = x[torch.arange(len(x)) % 2 == 1]
    return rows * torch.arange(rows.shape[0])[:, None]


def by_place(x: Tensor, kinds: Tensor) -> Tensor:
    places = torch.arange(3) * 2
    return x[places[1]] + x[:, places[2]].sum() + x[places[0], places[1]]


def checked(x: Tensor, kinds: Tensor) -> Tensor:
    weights = torch.linspace(1, 2, 6)
    return x * weights[:, None] if weights.max() > 1.5 else x


@pytest.mark.parametrize(
    "function", [off_diagonal, upper_triangle, selected, every_second, by_place, checked]
)
def test_pieces_by_constants(function: Pieces) -> None:
    assert compare(workload(function)).worst < 1e-12


def drawn(x: Tensor, kinds: Tensor) -> Tensor:
    return x[torch.rand(6) > 0.5].cumsum(0)


def of_the_batch(x: Tensor, kinds: Tensor) -> Tensor:
    return x[kinds == 1].cumsum(0)


def written(x: Tensor, kinds: Tensor) -> Tensor:
    mask = torch.eye(6, dtype=torch.bool)
    mask[0] = kinds > 0
    return (x @ x.T)[mask].cumsum(0)


@pytest.mark.parametrize("function", [drawn, of_the_batch, written])
def test_masks_that_are_no_constants(function: Pieces) -> None:
    with pytest.raises(CaptureError):
        capture(workload(function))


def first_ones(x: Tensor, kinds: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for kind in range(3):
        rows = (kinds == kind).nonzero().squeeze(-1)[:1]
        if rows.numel() == 0:
            continue
        y[rows] = x[rows] * (kind + 1)
    return y


def second_and_third(x: Tensor, kinds: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for kind in range(3):
        rows = (kinds == kind).nonzero(as_tuple=True)[0][1:3]
        y = y.index_add(0, rows, x[rows].sin())
    return y


@pytest.mark.parametrize("function", [first_ones, second_and_third])
def test_first_of_those_that_a_mask_chooses(function: Pieces) -> None:
    assert compare(workload(function)).worst < 1e-12


def last_ones(x: Tensor, kinds: Tensor) -> Tensor:
    rows = (kinds == 1).nonzero().squeeze(-1)[-1:]
    return x[rows]


def every_second_one(x: Tensor, kinds: Tensor) -> Tensor:
    rows = (kinds == 1).nonzero().squeeze(-1)[::2]
    return x[rows]


@pytest.mark.parametrize("function", [last_ones, every_second_one])
def test_others_of_those_that_a_mask_chooses(function: Pieces) -> None:
    with pytest.raises(CaptureError):
        capture(workload(function))


def by_listed_sizes(x: Tensor, kinds: Tensor) -> Tensor:
    sizes = torch.tensor([[1, 2], [2, 1]])
    first, second = torch.split(x.T, (sizes.prod(-1) * 2).tolist())
    heights = [torch.arange(h).repeat(w) for h, w in sizes.tolist()]
    return first + second * torch.cat(heights).sum()


def repeated(x: Tensor, kinds: Tensor) -> Tensor:
    counts = torch.tensor([1, 0, 2, 3])
    rows = torch.repeat_interleave(x.T[:4], counts, dim=0)
    return rows * torch.repeat_interleave(counts * 2, counts)[:, None]


def repeated_flat(x: Tensor, kinds: Tensor) -> Tensor:
    return x.repeat_interleave(torch.arange(6 * D) % 3) * 2


def distinct(x: Tensor, kinds: Tensor) -> Tensor:
    ends = torch.unique_consecutive(torch.tensor([0, 2, 2, 5]))
    none = torch.zeros(2, 2).nonzero()
    return (
        x.T[ends]
        * (1 + none[none[:, 0] == 1].sum())
        * (torch.arange(4) > 1).nonzero().flatten().sum()
    )


def resized(x: Tensor, kinds: Tensor) -> Tensor:
    mask = torch.ones(6, 4, 2)
    sizes = zip(mask.sum(1)[:, 0].long(), mask.sum(2)[:, 0].long(), strict=True)
    image = x.view(1, 6, 2, 4)
    large = [F.interpolate(image, size=(h, w * 2), mode="bilinear") for h, w in sizes]
    return torch.cat(large)


def padded(x: Tensor, kinds: Tensor) -> Tensor:
    more = torch.ceil(torch.tensor(3) / 2).to(torch.int64)
    wide: Tensor = F.pad(x, (1, cast(Any, more)))
    return wide * torch.arange(cast(Any, D + 1 + more))


@pytest.mark.parametrize(
    "function", [by_listed_sizes, repeated, repeated_flat, distinct, resized, padded]
)
def test_sizes_by_constants(function: Pieces) -> None:
    assert compare(workload(function)).worst < 1e-12


def listed_of_the_batch(x: Tensor, kinds: Tensor) -> Tensor:
    return torch.split(x, kinds.tolist())[0]


def repeated_by_the_batch(x: Tensor, kinds: Tensor) -> Tensor:
    return x.repeat_interleave(kinds, dim=0).cumsum(0)


def padded_by_the_batch(x: Tensor, kinds: Tensor) -> Tensor:
    return F.pad(x, (0, cast(Any, kinds[0])))


@pytest.mark.parametrize(
    "function", [listed_of_the_batch, repeated_by_the_batch, padded_by_the_batch]
)
def test_sizes_by_the_batch(function: Pieces) -> None:
    with pytest.raises(CaptureError, match=r"value of a tensor|rows that a mask chooses"):
        capture(workload(function))
