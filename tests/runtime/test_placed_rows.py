"""Rows at the places of a mask: torch's own numbers, and a count of those of some samples."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.pytorch.placed_rows import place_rows
from autopar.runtime.shared.settings import ProgramError

MASK = torch.tensor([[True, False, True], [False, True, True]])


def test_as_torch_does() -> None:
    x, rows = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    placed = place_rows(x, MASK, rows)
    assert torch.equal(placed, x.masked_scatter(MASK.unsqueeze(-1), rows))
    torch.autograd.backward(placed.square().sum())
    assert torch.equal(rows.grad, 2 * rows)  # type: ignore[arg-type]
    assert torch.equal(x.grad, torch.where(MASK.unsqueeze(-1), 0, 2 * x))  # type: ignore[arg-type]


def test_more_rows_than_places() -> None:
    x, rows = torch.zeros(2, 3), torch.arange(1.0, 6.0)
    assert place_rows(x, MASK, rows, more=True).tolist() == [[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]]
    with pytest.raises(ProgramError, match=r"4 places.*5 rows.*each sample must bring as many"):
        place_rows(x, MASK, rows)


def test_fewer_rows_than_places() -> None:
    with pytest.raises(
        ProgramError, match=r"4 places, and there are 3 rows.*give as many, or more"
    ):
        place_rows(torch.zeros(2, 3), MASK, torch.zeros(3), more=True)


def test_without_values_nothing_is_counted() -> None:
    x, mask, rows = (t.to("meta") for t in (torch.zeros(2, 3), MASK, torch.zeros(5)))
    assert place_rows(x, mask, rows).shape == (2, 3)
