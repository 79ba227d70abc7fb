# mypy: disable-error-code="no-any-return,no-untyped-call"
"""Pieces of equal length that a model runs one by one, and tables that samples share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.batch import sample_dims
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.rules.batch import batch_flow
from tests.emit.harness import check, emitted
from tests.emit.random_stage import random_stage

B, N, HEADS, D = 8, 6, 2, 4
WIDTH = HEADS * D
Body = Callable[["Model", Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * N, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = x + self.table(places * 1)
        places += 1
        return x


class Model(nn.Module):
    """Rows of all images one behind the other, as transformers' Qwen2-VL has them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table, self.body = nn.Embedding(B * N, WIDTH), body
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        mixed = self.body(self, x.flatten(0, 1), grid)
        return self.out(mixed.reshape(B, N, -1)).square().mean()

    def heads(self, x: Tensor) -> list[Tensor]:
        """[1, heads, rows, d] each."""
        q, k, v = self.qkv(x).reshape(len(x), 3, HEADS, D).permute(1, 0, 2, 3).unbind(0)
        return [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, N, WIDTH, generator=generator)
    return {"x": x, "grid": torch.tensor([[2, 3]] * B)}


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _images(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    lengths = (grid[:, 0] * grid[:, 1]).tolist()
    pieces = [t.split(lengths, 2) for t in m.heads(x)]
    mixed = torch.cat([_attended(*each) for each in zip(*pieces, strict=True)], 1)
    return mixed.reshape(len(x), -1)


def _in_layers(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """What comes out of one is cut again, and only put together in between."""
    for _ in range(2):
        x = torch.cat(x.split([N] * B)) + _images(m, x, grid)
    return x


def _windows(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Two in each image."""
    h, _ = grid[0].tolist()
    pieces = [t.chunk(B * h, 2) for t in m.heads(x)]
    mixed = torch.cat([_attended(*each) for each in zip(*pieces, strict=True)], 1)
    return mixed.reshape(len(x), -1)


def _along(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Put together along the dim that they were cut along, behind another."""
    pieces = [t.split([N] * B, 2) for t in m.heads(x)]
    each = zip(*pieces, strict=True)
    mixed = torch.cat([F.scaled_dot_product_attention(*e).tanh() * 2 for e in each], 2)
    return mixed.squeeze(0).transpose(0, 1).reshape(len(x), -1)


def _rows(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Pieces of rows, which one layer takes, put together along their rows, and side by side."""
    made = [m.out(t).tanh() for t in x.split([N] * B)]
    wide = torch.cat([m.out(t).sigmoid() for t in x.split([N] * B)], 1)
    return torch.cat(made) + wide.unflatten(1, (B, -1)).transpose(0, 1).flatten(0, 1)


def _samples(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Each sample by itself: a loop over the batch, by places in it, scaled by its sizes."""
    every = x.view(B, N, -1)
    made = []
    for t, (h, w) in zip(every, grid.tolist(), strict=True):
        scale = torch.tensor([float(h), float(w)] * (WIDTH // 2))
        heads = m.out(t[: h * w]).reshape(N, HEADS, D).tanh()[:, :, : D - 1] / D
        made.append(heads.flatten(1) * scale[: WIDTH - HEADS])
    chosen = torch.stack([m.out(every[i]).clamp(min=0) for i in range(len(every))])
    again = torch.stack(list(every.unbind(0)))
    apart = torch.stack([m.out(t).reshape(N, HEADS, D).sin() for t in every]).flatten(2)
    return F.pad(torch.stack(made), (0, HEADS)) + chosen * again + apart


def _far_behind(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """More ops in a row than are followed, each of which reads twice what is before it."""
    pieces = x.split([N] * B)
    for _ in range(70):
        pieces = [t.sin() + t for t in pieces]
    return torch.cat(pieces)


def _places(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """A row of a table for each place of an image, found image by image, and a number for it."""
    places = torch.cat([torch.arange(h * w).reshape(h, w).t().flatten() for h, w in grid])
    far = torch.stack([places % 3, places // 3], 1).float().norm(dim=1)
    return m.out(x + m.table(places)) * far[:, None]


def _written(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """As a library fills a table of the batch, sample by sample."""
    places = torch.zeros(2, B, N, dtype=torch.int64)
    for i, (h, w) in enumerate(grid):
        places[:, i] = torch.cat([torch.arange(h), torch.arange(N - h) + w]).expand(2, -1)
    return m.out(x.view(B, N, -1) + m.table(places[1]))


def _rewritten(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Tables that are written after they were read, by what is known and by what is not."""
    places = torch.cat([torch.arange(h * w) for h, w in grid])
    x = x + m.table(places * 1)
    far = places.clone()
    near = places.view(B, N)
    places += 1
    x = x * m.table(places * 1) + near.flatten()[:, None] / 7
    places[:N] = (x[:N, 0] > 0).long()
    x = x + m.table(places * 1)
    far[(x[:, 1] > 0)] = 2
    return m.out(x - m.table(far))


def _of_layers(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """The table goes through layers that read it, and write into it."""
    places = torch.cat([torch.arange(h * w) for h, w in grid])
    for layer in m.layers:
        x = layer(x, places)
    return x + m.table(places * 1)


def _read_late(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """A number that counts on, and what was made of it before."""
    start, made = grid[0, 0] * 1, []
    for h, w in grid:
        wide = start.expand(N)
        made.append(m.table(torch.arange(h * w) + start % 3) * (wide * 1)[:, None])
        start += 1
    return m.out(x + torch.cat(made) * (start * 1))


def _normalised(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """By statistics of a piece, which are not those of all pieces."""
    return torch.cat([m.norm(m.out(t)).relu() for t in x.split([N] * B)])


def _written_by_another_name(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    places = torch.cat([torch.arange(h * w) for h, w in grid])
    view = places.view(B, N)
    places.masked_fill_(x[:, 0] > 0, 1)
    return m.out(x.view(B, N, -1) + m.table(view))


def _number_by_another_name(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    h, _ = grid[0].tolist()
    number = grid[0, 1].clone()
    wide = number.expand(WIDTH)
    number.add_(h)
    return m.out(x * (wide * 1))


TOGETHER = (_images, _in_layers, _windows, _along, _rows, _samples, _places, _written)


def _captured(body: Body) -> Captured:
    return capture(Workload(model=partial(Model, body), batch=batch))


@pytest.mark.parametrize("body", TOGETHER)
def test_they_run_together_and_split_as_the_batch_does(body: Body) -> None:
    made = _captured(body)
    assert batch_flow(made.graph, sample_dims(made.batch)).obstacles == ()
    kinds = [op.kind for op in made.graph.ops]
    assert kinds.count("attention") <= 2
    for seed, mesh in enumerate(("tp=2", "dp_shard=2 x tp=2", "dp_replicate=4")):
        program = emitted(
            made, random_stage(made, Mesh.parse(mesh), 1 + seed % 2, seed), 1 + seed % 2
        )
        check(program, Model(body), batch())


def _uneven(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    pieces = [t.split([N - 1, N + 1] * (B // 2), 2) for t in m.heads(x)]
    return torch.cat([_attended(*each) for each in zip(*pieces, strict=True)], 1).reshape(
        len(x), -1
    )


def _another(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """One image is attended to otherwise."""
    pieces = zip(*(t.split([N] * B, 2) for t in m.heads(x)), strict=True)
    made = [_attended(*each) * (2 if i == 3 else 1) for i, each in enumerate(pieces)]
    return torch.cat(made, 1).reshape(len(x), -1)


def _turned(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Every image attends to the one behind it."""
    q, k, v = (t.split([N] * B, 2) for t in m.heads(x))
    each = zip(q, k[1:] + k[:1], v[1:] + v[:1], strict=True)
    return torch.cat([_attended(*e) for e in each], 1).reshape(len(x), -1)


def _summed(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Softmax over what is 1 in each piece, which is none of all of them together."""
    pieces = m.heads(x)[0].split([N] * B, 2)
    mixed = torch.cat([t.softmax(0) + t for t in pieces], 2)
    return mixed.squeeze(0).transpose(0, 1).reshape(len(x), -1)


def _counted(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Places count on from image to image."""
    steps = torch.cat([torch.arange(h * w) + i * N for i, (h, w) in enumerate(grid.tolist())])
    return m.out(x + m.table(steps))


def _one_is_another(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """Samples in another order, one left out for another, parts and sums of one, other scales."""
    every = x.view(B, N, -1)
    turned = torch.stack([m.out(every[B - 1 - i]) for i in range(B)])
    double = torch.stack([m.out(every[max(i, 1)]) for i in range(B)])
    summed = torch.stack([t.softmax(0) + t.mean(0) for t in every])
    first = torch.stack([m.out(t[:1]).expand(N, -1) for t in every])
    scaled = torch.stack([m.out(t) * float(i) for i, t in enumerate(every)])
    across = torch.stack([m.out(every[:, i]) for i in range(N)], 1)
    return turned + double.sin() + summed * first + scaled.cos() * across


def _nothing_differs(m: Model, x: Tensor, grid: Tensor) -> Tensor:
    """One parameter, in another shape, for every sample."""
    every = torch.stack([m.out.weight[:N].reshape(N, HEADS, D).tanh() for _ in range(B)])
    behind = torch.cat([m.out.bias.view(1, 1, WIDTH) for _ in range(B)])
    return x.view(B, N, -1) * every.flatten(2) + behind


OTHERS = (
    *(_far_behind, _nothing_differs),
    *(_uneven, _another, _turned, _summed, _counted, _rewritten, _of_layers, _read_late),
    *(_one_is_another, _normalised, _written_by_another_name, _number_by_another_name),
)


@pytest.mark.parametrize("body", OTHERS)
@pytest.mark.some(6)
def test_others_are_right_as_they_are(body: Body) -> None:
    made = _captured(body)
    for seed, mesh in enumerate(("tp=2", "dp_shard=2 x tp=2", "dp_replicate=4")):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed)), Model(body), batch())


def test_what_draws_stays_one_by_one() -> None:
    """Pieces that are used twice have one draw."""

    def dropped(m: Model, x: Tensor, grid: Tensor) -> Tensor:
        pieces = [F.dropout(m.out(t), 0.5) for t in x.split([N] * B)]
        return torch.cat([t * 2 for t in pieces]) - torch.cat([t.tanh() for t in pieces])

    kinds = [op.kind for op in _captured(dropped).graph.ops]
    assert kinds.count("dropout") == B
