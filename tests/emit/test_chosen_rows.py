"""Rows that a mask chooses: the program computes all of them, and the mask says which count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch.errors import CaptureError
from autopar.nouns.batch import sample_dims
from autopar.nouns.mesh import Mesh
from autopar.rules.batch import batch_flow
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

BATCH, WORDS, WIDTH, CLASSES = 4, 6, 8, 5


class Model(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss
        self.into, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.vector = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(self, self.into(x), labels, labels > 1)
        return loss


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (BATCH, WORDS), generator=generator)
    return {"x": torch.randn(BATCH, WORDS, WIDTH, generator=generator), "labels": labels}


def _mean_of_rows(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    return h[keep].square().mean()


def _cross_entropy(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h[keep]), y[keep])


def _by_its_length(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    rows = h[keep]
    return torch.tanh(rows).sum() / rows.shape[0] + rows.exp().sum() / rows.numel()


def _logarithm(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """What is left out would be the logarithm of nothing."""
    share = torch.where(keep, h.square().sum(-1), 0)
    return share[keep].log().square().mean() + (1 / share[keep]).sum()


def _selected(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    chosen = torch.masked_select(h, keep.unsqueeze(-1).expand_as(h)).view(-1, WIDTH)
    return F.kl_div(chosen.log_softmax(-1), chosen.detach().softmax(-1), reduction="batchmean") + (
        torch.masked_select(h[..., 0], keep).mean() + chosen.log_softmax(-1)[:, 0].mean()
    )


def _largest(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    rows = h[keep]
    return rows.amax(0).sum() - rows.amin(0).sum() + torch.logsumexp(rows, 0).mean()


def _product(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    rows = h[keep]
    return (rows.T @ rows).square().mean()


def _written_back(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    h = h.clone()
    h[keep] = torch.tanh(m.into(h[keep]))
    h[~keep] = m.vector
    return h.square().mean()


def _places(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """As a layer of experts visits the words of one."""
    flat = h.flatten(0, 1)
    (rows,) = torch.where(keep.flatten())
    return torch.zeros_like(flat).index_add(0, rows, m.into(flat[rows])).square().mean()


def _routed(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """As a layer of experts is written by hand: each adds to the tokens that chose it."""
    flat = h.flatten(0, 1)
    weights, chosen = flat[:, :4].softmax(-1).topk(2, -1)
    out = torch.zeros_like(flat)
    for expert in range(3):
        token, slot = torch.where(chosen == expert)
        scale = weights[token, slot, None] + m.vector[:2][slot, None]
        out.index_add_(0, token, m.into(flat[token]) * scale)
    return out.square().mean()


def _routed_by_slots(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """As Mixtral's: the mask of an expert has slots before tokens."""
    flat = h.flatten(0, 1)
    weights, chosen = flat[:, :4].softmax(-1).topk(2, -1)
    mask = F.one_hot(chosen, 4).permute(2, 1, 0)
    out = torch.zeros_like(flat)
    for expert in range(4):
        slot, token = torch.where(mask[expert])
        state = m.into(flat[None, token].reshape(-1, WIDTH)) * (expert + 1)
        out.index_add_(0, token, (state * weights[token, slot, None]).to(h.dtype))
    return out.square().mean()


def _routed_and_written(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    flat = h.flatten(0, 1)
    weights, chosen = flat[:, :4].softmax(-1).topk(2, -1)
    out = torch.zeros_like(flat)
    for expert in range(4):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        out[token] += weights[token, slot, None] * m.into(flat[token])
    return out.square().mean()


def _twice(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    rows, labels = h[keep], y[keep]
    return rows[labels > 2].sum() + rows[labels <= 2].square().mean()


def _words_of_samples(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """Of the samples that the first word chooses."""
    samples = keep[:, 0]
    return h[samples][keep[samples]].square().mean()


def _softmax_over_rows(m: Any, h: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    return (h[keep].softmax(0) * h[keep]).sum()


RIGHT = {
    f.__name__.lstrip("_"): f
    for f in (
        _mean_of_rows, _cross_entropy, _by_its_length, _logarithm, _selected, _largest, _product,
        _written_back, _places, _routed, _routed_by_slots, _routed_and_written, _twice,
        _words_of_samples, _softmax_over_rows,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_numbers(name: str) -> None:
    torch.manual_seed(0)
    model = Model(RIGHT[name])
    made = capture_of(partial(Model, RIGHT[name]), batch)
    for mesh in ("dp_shard=2 x tp=2", "dp_replicate=4"):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, 0)), model, batch())


@pytest.mark.parametrize("loss", [_routed, _routed_by_slots, _routed_and_written])
def test_tokens_are_routed_apart(loss: Any) -> None:
    made = capture_of(partial(Model, loss), batch)
    assert not batch_flow(made.graph, sample_dims(made.batch)).obstacles


def test_it_is_told_that_all_rows_are_computed() -> None:
    made = capture_of(partial(Model, _mean_of_rows), batch)
    (note,) = (n for n in made.notes if n.startswith("Rows that a mask chooses are all computed"))
    assert "test_chosen_rows.py" in note


REFUSED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in order": lambda h, y, keep: h[keep].cumsum(0).sum(),
    "the first": lambda h, y, keep: h[keep][0].sum(),
    "the first few": lambda h, y, keep: h[keep][:2].sum(),
    "by place": lambda h, y, keep: (h[keep] * torch.arange(h[keep].shape[0])[:, None]).sum(),
    "deviation": lambda h, y, keep: h[keep].std(0).sum(),
    "joined": lambda h, y, keep: torch.cat([h[keep], h[keep]]).square().sum(),
    "cut by samples": lambda h, y, keep: h[keep].view(BATCH, -1).softmax(-1)[:, 0].sum(),
    "row of another": lambda h, y, keep: h.flatten(0, 1).select(0, h[keep].shape[0] - 1).sum(),
    "filled with": lambda h, y, keep: (h * torch.full((WIDTH,), h[keep].shape[0])).sum(),
    "two masks": lambda h, y, keep: (h[keep] * h[y < 3].sum(0)).sum() + (h[keep] + h[~keep]).sum(),
    "sorted": lambda h, y, keep: (h[keep].sort(0).values * h[keep]).sum(),
    "batch norm": lambda h, y, keep: (F.batch_norm(h[keep], None, None, training=True) ** 2).sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_all_rows_together_is_refused(name: str) -> None:
    with pytest.raises(CaptureError):
        capture_of(partial(Model, lambda m, h, y, keep: REFUSED[name](h, y, keep)), batch)
