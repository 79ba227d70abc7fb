"""Ops that mix samples, and ops that people reach for seldom: numbers under data and model axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.mesh import Mesh
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

BATCH, WORDS, WIDTH, KEPT = 4, 6, 8, 5


class Model(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.EmbeddingBag(10, WIDTH, mode="mean")
        self.keep: Tensor
        self.register_buffer("keep", torch.arange(WIDTH) % 3 != 1)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        made: Tensor = self.body(self, self.into(x), order)
        return (torch.tanh(self.out(made)) * made).mean()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, WORDS, WIDTH, generator=generator)
    return {"x": x, "order": torch.randperm(BATCH, generator=generator)}


def _heads_before_the_batch(m: Any, h: Tensor, order: Tensor) -> Tensor:
    cut = torch.cat(h.chunk(2, dim=2), dim=0)
    mixed = torch.bmm((cut @ cut.mT).softmax(-1), cut)
    return torch.cat(mixed.chunk(2, dim=0), dim=2)


def _bags(m: Any, h: Tensor, order: Tensor) -> Tensor:
    """The second bag is empty."""
    ids = (h.detach().abs()[:, :3, 0].flatten() * 3).long().clamp(max=9)
    begins = torch.tensor([0, 2, 2, 7])
    bags: Tensor = m.table(ids, begins)
    return h + bags[:, None]


def _padded_bags(m: Any, h: Tensor, order: Tensor) -> Tensor:
    """Bags of one size of every mode, the first of padding alone, and those of other sizes."""
    ids = (h.detach().abs()[:, :3, 0] * 3).long().clamp(max=9)
    ids = torch.where(order[:, None] == 0, 2, ids)
    weights, table = h[:, :3, 1], m.table.weight
    bags = F.embedding_bag(ids, table, mode="sum", per_sample_weights=weights, padding_idx=2)
    bags = bags * F.embedding_bag(ids, table, mode="max", padding_idx=2)
    bags = bags + F.embedding_bag(ids, table, mode="mean", padding_idx=2)
    bags = bags + F.embedding_bag(ids, table, mode="sum", per_sample_weights=weights)
    begins, flat = torch.tensor([0, 2, 2, 7]), ids.flatten()
    bags = bags + F.embedding_bag(flat, table, begins, mode="mean", padding_idx=2)
    given: Any = {"mode": "sum", "per_sample_weights": weights.flatten(), "padding_idx": 2}
    return h + (bags + F.embedding_bag(flat, table, begins, **given))[:, None]


def _written_by_a_mask(m: Any, h: Tensor, order: Tensor) -> Tensor:
    made = h.new_zeros(h.shape)
    made[..., m.keep] = h[..., :KEPT] * 2
    return made


def _strided(m: Any, h: Tensor, order: Tensor) -> Tensor:
    h = h.contiguous()
    windows = h.as_strided((BATCH, 2, 4, WIDTH), (WORDS * WIDTH, 2 * WIDTH, WIDTH, 1))
    return windows.flatten(1, 2)


BODIES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "samples in another order": lambda m, h, order: h + h[order],
    "sample before": lambda m, h, order: h * h.roll(1, 0),
    "last first": lambda m, h, order: h.flip(0) + 1,
    "sorted over samples": lambda m, h, order: h.sort(0).values,
    "softmax over samples": lambda m, h, order: h.softmax(0),
    "running sum over samples": lambda m, h, order: h.cumsum(0),
    "deviation over samples": lambda m, h, order: (h - h.mean(0)) / (h.std(0) + 1e-3),
    "the first sample": lambda m, h, order: h - h[:1],
    "time before samples": lambda m, h, order: m.out(h.transpose(0, 1).reshape(-1, WIDTH)),
    "mixed and drawn": lambda m, h, order: F.dropout(h.flip(0), 0.5),
    "heads before the batch": _heads_before_the_batch,
    "bags": _bags,
    "padded and weighted bags": _padded_bags,
    "written by a mask": _written_by_a_mask,
    "strided": _strided,
    "windows": lambda m, h, order: h.unfold(1, 3, 2).mean(-1),
    "pairs": lambda m, h, order: h + torch.pdist(h.flatten(1)).sum(),
    "trace": lambda m, h, order: h * torch.trace(h.flatten(1) @ h.flatten(1).T),
    "factors": lambda m, h, order: torch.addmm(h[:, 0], h[:, 1], m.out.weight, beta=0.5, alpha=-2),
    "exponential of a matrix": lambda m, h, order: h @ torch.matrix_exp(m.out.weight),
    "largest so far": lambda m, h, order: h.cummax(1).values + h.logcumsumexp(2),
}


@pytest.mark.parametrize("name", BODIES)
def test_numbers(name: str) -> None:
    torch.manual_seed(0)
    model = Model(BODIES[name])
    made = capture_of(partial(Model, BODIES[name]), batch)
    for mesh in ("dp_shard=2 x tp=2", "dp_replicate=4"):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, 0)), model, batch())
