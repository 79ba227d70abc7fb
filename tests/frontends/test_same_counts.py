"""Equal masks choose equally many rows, however they are written; others do not."""

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

Rows = Callable[[Tensor, Tensor, Tensor], Tensor]


class Two(nn.Module):
    def __init__(self, function: Rows) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return self.function(self.first(x), self.second(x), kept)


def workload(function: Rows) -> autopar.Workload:
    def batch() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        kept = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
        return {"x": torch.randn(3, 5, 8, generator=generator), "kept": kept}

    return autopar.Workload(model=lambda: Two(function), batch=batch)


def selected(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    wide = kept.bool().unsqueeze(-1).expand_as(a)
    p = torch.masked_select(a, wide).view(-1, a.size(-1))
    q = torch.masked_select(b, wide).view(-1, b.size(-1))
    assert p.size() == q.size()
    soft = F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean")
    return soft + F.mse_loss(p, q)


def written_twice(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    return ((a[kept == 1] - b[kept == 1]) ** 2).sum(-1).mean()


def rows_and_mask(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    a, b, kept = a.flatten(0, 1), b.flatten(0, 1), kept.flatten()
    rows = (kept > 0).nonzero().squeeze(1)
    return (a[rows] * b[kept > 0]).sum()


@pytest.mark.parametrize("function", [selected, written_twice, rows_and_mask])
def test_equal_masks(function: Rows) -> None:
    assert compare(workload(function)).worst < 1e-12


def other_masks(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    return (a[kept == 1] * b[kept == 0]).sum()


def written_between(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    mask = kept == 1
    flat = mask.view(-1)
    p = a.flatten(0, 1)[flat]
    mask[0, 0] = False
    return (p * b.flatten(0, 1)[flat]).sum()


@pytest.mark.parametrize("function", [other_masks, written_between])
def test_other_masks(function: Rows) -> None:
    with pytest.raises(CaptureError):
        capture(workload(function))


def rows_of_their_own(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    """As many rows of ``b`` as are chosen, as features of images have it in every layer."""
    a, mask = a.clone(), kept == 1
    a[mask, :] = a[mask, :] + b.view(-1, 8)[:6]
    return (a * torch.arange(5)[:, None]).square().sum()


def rows_from_their_own(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    chosen = b.view(-1, 8)[:6] * a[kept == 1].sin()
    return chosen.square().mean() + (b.view(-1, 8)[:6] - a[kept == 1]).square().sum()


def too_few_rows_of_their_own(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    return (a[kept == 1] + b.view(-1, 8)[:6, :1]).sum()


@pytest.mark.parametrize(
    "function", [rows_of_their_own, rows_from_their_own, too_few_rows_of_their_own]
)
def test_as_many_rows_of_another_tensor(function: Rows) -> None:
    with pytest.raises(CaptureError, match="rows that a mask chooses"):
        capture(workload(function))
