"""Ranks that hold pieces drop apart, and are together again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch.dropout import dropout
from autopar.runtime.pytorch.layers import attention
from autopar.runtime.pytorch.recomputing import recompute
from tests.emit import simulated

TP = Mesh.parse("tp=2")
P = 0.5


def on_ranks(task: Any, mesh: Mesh = TP) -> list[Any]:
    """``task(ranks)`` of each rank, all of which start from one stream."""

    def seeded(here: Any) -> Any:
        torch.manual_seed(3)
        return task(here)

    with torch.random.fork_rng(devices=[]):
        return simulated.run(mesh, seeded)[0]


def test_pieces_are_dropped_apart_and_what_follows_alike() -> None:
    def task(here: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.ones(500 + 100 * int(here.rank))  # pieces of different sizes
        first, second = dropout(x, P, axis="tp"), dropout(x, P, axis="tp")
        return first[:500], second[:500], torch.rand(8)

    (a, again, after), (b, _, other) = on_ranks(task)
    for one, two in ((a, b), (a, again)):
        assert 0.35 < (one == two).double().mean() < 0.65
    assert torch.equal(after, other)
    for dropped in (a, b):
        assert set(dropped.tolist()) == {0.0, 1 / (1 - P)}
        assert 0.35 < (dropped == 0).double().mean() < 0.65


def test_axes_together_are_one_place() -> None:
    mesh = Mesh.parse("cp=2 x tp=2")
    masks = on_ranks(lambda _: dropout(torch.ones(64), P, axis=("cp", "tp")), mesh)
    assert len({tuple(m.tolist()) for m in masks}) == 4
    masks = on_ranks(lambda _: dropout(torch.ones(64), P, axis="tp"), mesh)
    assert len({tuple(m.tolist()) for m in masks}) == 2


def test_whole_features_are_dropped() -> None:
    a, b = on_ranks(lambda _: dropout(torch.ones(8, 16, 5), P, axis="tp", features=True))
    for mask in (a, b):
        assert torch.equal(mask, mask[..., :1].expand_as(mask))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("p", [0.0, P * False])
def test_nothing_is_drawn_where_nothing_is_dropped(p: float) -> None:
    def task(_: Any) -> tuple[Tensor, Tensor]:
        return dropout(torch.ones(4), p, axis="tp"), torch.rand(4)

    ((kept, drawn), _) = on_ranks(task)
    assert torch.equal(kept, torch.ones(4))
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_attention_drops_other_scores_on_every_rank() -> None:
    def task(_: Any) -> tuple[Tensor, Tensor]:
        q, k = torch.zeros(1, 2, 16, 4), torch.zeros(1, 2, 16, 4)
        v = torch.eye(16).expand(1, 2, 16, 16)  # the result is the scores, dropped
        return attention(q, k, v, dropout=P, axis="tp"), torch.rand(4)

    (a, after), (b, other) = on_ranks(task)
    assert 0.35 < ((a == 0) == (b == 0)).double().mean() < 0.65
    assert torch.equal(after, other)


def test_a_block_that_runs_again_drops_what_it_dropped() -> None:
    def task(_: Any) -> tuple[Tensor, Tensor]:
        x = torch.ones(256, requires_grad=True)
        y = recompute(lambda x: dropout(x * x, P, axis="tp") * 3, x)
        dropout(torch.ones(9), P, axis="tp")  # the stream goes on before backward
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    for y, gradient in on_ranks(task):
        assert torch.equal(gradient, 2 * y)
