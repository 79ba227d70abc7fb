# mypy: disable-error-code="no-any-return"
"""Parts of a batch that a model joins and runs at once: ranks have whole samples of what is joined,
and what asks for the model's own order gets it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.shared.captured import Captured
from autopar.nouns.batch import sample_dims
from autopar.nouns.mesh import Mesh
from autopar.rules.batch import batch_flow
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

BATCH, WORDS, WIDTH = 4, 6, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.b(F.gelu(self.a(self.norm(x))))
        return out


class Centred(Layer):
    """Its own samples' mean: not what a sample alone is made of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.roll(1, 0) / 2)


class Model(nn.Module):
    def __init__(self, loss: Any, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.loss = loss
        self.layers = nn.Sequential(layer(), layer())
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(self, x, y, labels)
        return loss


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, BATCH, WORDS, WIDTH, generator=generator)
    return {"x": x, "y": y, "labels": torch.randint(0, WIDTH, (BATCH,), generator=generator)}


def _preferred(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    """Of two answers (DPO)."""
    both = m.layers(torch.cat([x, y])).mean(1)
    picked = both.log_softmax(-1).gather(-1, torch.cat([labels, labels])[:, None])
    return -F.logsigmoid(picked[:BATCH] - picked[BATCH:]).mean()


def _guided(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    """By three, of which two are taken out together."""
    three = m.layers(torch.cat((x, y, x * y), dim=0))
    rest = three[BATCH:]
    return (three[:BATCH] - 2 * rest[:BATCH] * rest[BATCH:]).square().mean()


def _in_chunks(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    a, b = m.layers(torch.cat([x, y])).chunk(2)
    c, d = m.layers(torch.cat([x, y])).split(BATCH)
    return (a * d - b).square().mean() + (c * b).mean()


def _parts_in_a_dim(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    a, b = m.layers(torch.cat([x, y])).view(2, BATCH, WORDS, WIDTH)
    return (a - b).square().mean()


def _words_as_rows(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    rows = m.layers(torch.cat([x, y])).reshape(-1, WIDTH)
    wanted = torch.cat([labels, labels.flip(0)]).repeat_interleave(WORDS)
    return F.cross_entropy(rows, wanted) + rows[: BATCH * WORDS].square().mean()


def _words_first(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    both = m.layers(torch.cat([x, y]).transpose(0, 1)).exp()
    return both[:, :BATCH].mean() / 3 - both[:, BATCH:].square().mean()


def _attended(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    both = torch.cat([x, y])
    out, _ = m.attention(both, both, both, need_weights=False)
    return (out[:BATCH] * out[BATCH:]).sum(-1).tanh().mean()


def _statistics(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    both = m.norm(m.layers(torch.cat([x, y])).mean(1))
    return F.mse_loss(both[:BATCH], both[BATCH:].detach())


APART = {
    f.__name__.lstrip("_"): f
    for f in (
        _preferred, _guided, _in_chunks, _parts_in_a_dim, _words_first, _attended, _statistics,
    )
}  # fmt: skip


def _every_pair(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    """Of the views of all samples (SimCLR)."""
    z = F.normalize(m.layers(torch.cat([x, y])).mean(1), dim=-1)
    scores = (z @ z.T).masked_fill(torch.eye(2 * BATCH, dtype=torch.bool), -9.0)
    return F.cross_entropy(scores, (torch.arange(2 * BATCH) + BATCH) % (2 * BATCH))


def _in_order(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    z = m.layers(torch.cat([x, y])).mean(1)
    return (z.cumsum(0) * z).mean()


def _by_place(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    z = m.layers(torch.cat([x, y])).mean((1, 2))
    return (z * torch.arange(2 * BATCH)).mean() + z.sort().values[0]


def _a_cut_through_a_part(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    z = m.layers(torch.cat([x, y]))
    return (z[1:] * z[:-1]).mean() + z[BATCH - 1].sum()


def _looked_up(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    """Rows of samples, by number."""
    z = m.layers(torch.cat([x, y])).mean(1)
    return (F.embedding(labels, z) * z[:BATCH]).mean() + z[labels % BATCH].exp().mean()


def _beside_another(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    """That has as many rows, in the model's order."""
    z = m.layers(torch.cat([x, y]))
    return (z * torch.linspace(0, 1, 2 * BATCH)[:, None, None]).square().mean()


def _joined_again(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    z = m.layers(torch.cat([x, y]))
    w = m.layers(torch.cat([z, z.flip(0)]))
    return (w[: 2 * BATCH] * z).mean()


def _whole_moved(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    z = m.layers(torch.cat([x, y]))
    return (z.roll(BATCH, 0) * z).mean() + z.reshape(BATCH, 2, -1)[:, 0].exp().mean()


RIGHT = APART | {
    f.__name__.lstrip("_"): f
    for f in (
        _words_as_rows, _every_pair, _in_order, _by_place, _a_cut_through_a_part, _looked_up,
        _beside_another, _joined_again, _whole_moved,
    )
}  # fmt: skip


def made_of(loss: Any, layer: type[Layer] = Layer) -> Captured:
    return capture_of(partial(Model, loss, layer), batch)


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.some(8)
def test_numbers(name: str) -> None:
    torch.manual_seed(0)
    model, made = Model(RIGHT[name]), made_of(RIGHT[name])
    for mesh in ("dp_shard=2 x tp=2", "dp_replicate=4"):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, 0)), model, batch())


@pytest.mark.parametrize("name", APART)
def test_no_sample_needs_another(name: str) -> None:
    made = made_of(APART[name])
    obstacles = batch_flow(made.graph, sample_dims(made.batch)).obstacles
    assert all("statistics" in each for each in obstacles), obstacles
    (note,) = (n for n in made.notes if n.startswith("What is joined at"))
    assert "test_joined_samples.py" in note


def test_a_layer_that_mixes_samples_has_them_in_order() -> None:
    torch.manual_seed(0)
    model, made = Model(_preferred, Centred), made_of(_preferred, Centred)
    check(emitted(made, random_stage(made, Mesh.parse("dp_replicate=4"), 1, 0)), model, batch())
    assert not any(n.startswith("What is joined at") for n in made.notes)


def test_what_no_parameter_meets_is_left() -> None:
    def loss(m: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        z = torch.cat([m.layers(x), m.layers(y)]).mean(1)
        return (z @ z.T).square().mean()

    assert {op.kind for op in made_of(loss).graph.ops} & {"cat", "stack"} == {"cat"}
