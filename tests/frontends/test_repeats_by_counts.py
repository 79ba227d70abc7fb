"""`repeat_interleave` by counts of the batch, and masks that functions of indices make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

import autopar
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import CaptureError
from autopar.runtime.verify.pytorch.reference import random_batch
from tests.frontends.torch_referee import compare

B, S, D = 3, 6, 8
Function = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.function = function

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.function(self.linear(x), lengths).square().mean()


def workload(function: Function) -> autopar.Workload:
    def batch() -> dict[str, Tensor]:
        x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(0))
        return {"x": x, "lengths": torch.tensor([[1, 3, 2], [6, 0, 0], [2, 2, 2]])}

    return autopar.Workload(model=lambda: Model(function), batch=batch)


def documents(lengths: Tensor) -> Tensor:
    numbers = torch.arange(lengths.numel())
    return torch.repeat_interleave(numbers, lengths.flatten()).view(B, S)


def by_viewed_size(x: Tensor, lengths: Tensor) -> Tensor:
    ids = documents(lengths)
    return x * ids[..., None] * (ids[:, :, None] == ids[:, None, :]).sum(-1, keepdim=True)


def by_given_size(x: Tensor, lengths: Tensor) -> Tensor:
    rows = x[:, 0].repeat_interleave(torch.tensor([2, 0, 4]), dim=0, output_size=6)
    return rows.cumsum(0)


def along_columns(x: Tensor, lengths: Tensor) -> Tensor:
    return x[..., :3].repeat_interleave(lengths[0], dim=-1).view(B, S, S).cumsum(-1)


def masked(x: Tensor, lengths: Tensor) -> Tensor:
    ids = documents(lengths)

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[b, q] == ids[b, k]

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def first(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < 1

    mask = create_mask(or_masks(and_masks(same, causal), first), B, 1, S, S, device="cpu")
    q = x.unsqueeze(1)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), mask)


@pytest.mark.parametrize("function", [by_viewed_size, by_given_size, along_columns, masked])
def test_repeats_and_masks(function: Function) -> None:
    assert compare(workload(function)).worst < 1e-12


def of_any_size(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, 0].repeat_interleave(lengths[:, 0], dim=0).cumsum(0)


def several_entries(x: Tensor, lengths: Tensor) -> Tensor:
    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q.cumsum(0) >= k

    return x.unsqueeze(1) * create_mask(mask, B, 1, S, D, device="cpu")


def other_entries(x: Tensor, lengths: Tensor) -> Tensor:
    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q > 2 if bool(lengths[0, 0] > 3) else q < k

    return x.unsqueeze(1) * create_mask(mask, B, 1, S, D, device="cpu")


@pytest.mark.parametrize("function", [of_any_size, several_entries, other_entries])
def test_refused(function: Function) -> None:
    with pytest.raises(CaptureError):
        capture(workload(function))


def test_verify_keeps_lengths_that_add_up() -> None:
    lengths = random_batch(workload(documents))["lengths"]  # type: ignore[arg-type]
    assert sorted(lengths.tolist()) == [[1, 3, 2], [2, 2, 2], [6, 0, 0]]
