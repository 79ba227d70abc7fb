"""Buffers that a forward updates: what the next step sees is what one device would see."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from autopar.frontends.pytorch.errors import MutationError
from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch.carried import carry, write_carried
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

BATCH, WORDS, WIDTH, CLASSES = 8, 4, 8, 5


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (BATCH, WORDS), generator=generator)
    return {"x": torch.randn(BATCH, WORDS, WIDTH, generator=generator), "labels": labels}


class Codes(nn.Module):
    """A codebook moved towards the means of what it stands for."""

    codes: Tensor
    size: Tensor
    total: Tensor
    steps: Tensor

    def __init__(self, codes: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("codes", torch.randn(codes, WIDTH, generator=generator))
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("total", torch.randn(codes, WIDTH, generator=generator))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        one = F.one_hot(torch.cdist(h.detach(), self.codes).argmin(-1), len(self.codes)).type_as(h)
        chosen = one @ self.codes
        with torch.no_grad():
            flat = one.flatten(0, -2)
            self.size.data.mul_(0.9).add_(flat.sum(0), alpha=0.1)
            self.total.lerp_(flat.t() @ h.flatten(0, -2), 0.1)
            self.codes.copy_(self.total / self.size.clamp(min=1e-3)[:, None])
            self.steps += 1
        return h + (chosen - h).detach()


class Parts(nn.Module):
    """Parts of a larger buffer, in place."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(24.0).view(3, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.table[1:2, :3] = h.detach().mean((0, 1))[:3]
        self.table[2].mul_(0.5).add_(self.table[1])
        return h + self.table[2]


class Diagonal(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        square = h.flatten(0, 1).T @ h.flatten(0, 1)
        on = torch.diagonal(square).add_(-1).pow_(2).sum()
        return h + 0.01 * on + square.pow(2).mean()


class Replaced(nn.Module):
    """Buffers, and a tensor outside of the state, that others are put in the place of."""

    centre: Tensor
    before: Tensor
    given: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("before", torch.ones(WIDTH))
        self.register_buffer("given", torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        shifted = h - self.centre + self.before
        self.before = self.centre
        self.centre = 0.9 * self.centre + 0.1 * h.detach().mean((0, 1))
        self.given.data = self.given * 0.5 + shifted.detach().amax((0, 1))
        return shifted * self.given


class Norms(nn.Module):
    """Batch norms of every kind, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.BatchNorm1d(WIDTH, affine=False)
        self.both = nn.BatchNorm1d(WIDTH, momentum=0.3)
        self.none = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
        self.untracked = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, h: Tensor) -> Tensor:
        h = h.transpose(1, 2)
        h = self.plain(h) + self.plain(torch.tanh(h)) + self.untracked(h)
        normal: Tensor = self.none(self.both(h + 1) * h)
        return normal.transpose(1, 2)


class Mean(nn.Module):
    """Is called for what it keeps alone."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> None:
        self.mean.lerp_(h.detach().mean((0, 1)), 0.1)


class Unread(nn.Module):
    """A branch that no loss reads, as a head that a user leaves out, which counts all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mean = nn.Linear(WIDTH, WIDTH), Mean()
        self.norm, self.further = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, h: Tensor) -> Tensor:
        aside = self.further(torch.relu(self.norm(self.into(h).transpose(1, 2))))
        self.mean(aside.transpose(1, 2) + h)
        return h.sin()


class Seen(nn.Module):
    """Updated without the batch: any number of microbatches."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=2)
        self.other = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(1.0)
        h = self.other(F.gelu(self.inner(h)))
        return h * (1 + self.seen)


class Model(nn.Module):
    def __init__(self, part: type[nn.Module], layers: int = 1) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.parts = nn.ModuleList(part() for _ in range(layers))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.into(x)
        for part in self.parts:
            h = torch.tanh(part(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def made_model(part: type[nn.Module], layers: int = 1) -> Model:
    torch.manual_seed(0)
    return Model(part, layers)


@pytest.mark.parametrize("part", [Codes, Parts, Diagonal, Replaced, Norms, Unread, Seen])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.some(7)
def test_numbers(part: type[nn.Module], layers: int) -> None:
    model = made_model(part, layers)
    made = capture_of(partial(made_model, part, layers), batch)
    for seed, mesh in enumerate(("dp_shard=2 x tp=2", "dp_replicate=4", "tp=4")):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed)), model, batch())


def test_what_the_batch_does_not_decide_goes_with_microbatches() -> None:
    model = made_model(Seen, 2)
    made = capture_of(partial(made_model, Seen, 2), batch)
    stage = random_stage(made, Mesh.parse("dp_shard=2 x tp=2"), 4, 0)
    check(emitted(made, stage, microbatches=4), model, batch())
    again = emitted(made, stage, microbatches=4, recompute="full")
    check(again, model, batch(), issued=False)


class Penalised(nn.Module):
    """Equal layers with batch norms, each called twice, whose weights the loss reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(2)
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = x.flatten(0, 1)
        for layer in (*self.layers, *self.layers):
            h = h + layer(h)
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return F.cross_entropy(h[:, :CLASSES], labels.flatten()) + 0.01 * penalty


def made_penalised() -> Penalised:
    torch.manual_seed(0)
    return Penalised()


def test_statistics_of_layers_whose_weights_are_read_elsewhere_too() -> None:
    """A layer is given its weights and its statistics, which a part of them would leave behind."""
    model, made = made_penalised(), capture_of(made_penalised, batch)
    given = [name for block in made.graph.blocks.values() for name in block.body.inputs]
    assert any("running_mean" in name for name in given)
    for seed, mesh in enumerate(("tp=4", "dp_shard=2 x tp=2", "tp=2")):
        stage = random_stage(made, Mesh.parse(mesh), 1, seed)
        check(emitted(made, stage), model, batch())
    check(emitted(made, stage, recompute="full"), model, batch(), issued=False)


class Teacher(nn.Module):
    """A frozen copy of equal layers, which the forward moves towards them in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
            for _ in range(2)
        )
        self.target.requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        pairs = [*zip(self.online.parameters(), self.target.parameters(), strict=True)]
        for online, target in pairs[:2]:
            target.data = target.data * 0.9 + online.data * 0.1
        for online, target in pairs[2:4]:
            target.data.mul_(0.9).add_(online.data, alpha=0.1)
        for online, target in pairs[4:]:
            target.lerp_(online, 0.1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.update()
        with torch.no_grad():
            taught = self.target(x)
        loss: Tensor = (self.online(x) - taught).square().mean() + 0 * labels.sum()
        return loss


def made_teacher() -> Teacher:
    torch.manual_seed(0)
    return Teacher()


def test_frozen_parameters_that_the_forward_moves_are_held_as_buffers() -> None:
    model, made = made_teacher(), capture_of(made_teacher, batch)
    averages = {n for n, t in made.tensors.items() if t.role == "buffer"}
    assert averages == {n for n, _ in model.named_parameters() if n.startswith("target")}
    for seed, mesh in enumerate(("tp=2", "dp_shard=2 x tp=2")):
        check(emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed)), model, batch())


class Table(nn.Module):
    u: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(2))


def test_a_buffer_is_written_when_the_step_has_ended_and_not_in_evaluation() -> None:
    module = Table()
    carry(module, u=torch.zeros(2))
    assert module.u.tolist() == [1.0, 1.0]
    write_carried(module)
    assert module.u.tolist() == [0.0, 0.0]
    module.eval()
    carry(module, u=torch.ones(2))
    write_carried(module)
    assert module.u.tolist() == [0.0, 0.0]


class Grows(nn.Module):
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(2, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.queue = torch.cat([self.queue, h.detach()[:, 0]])
        return h + self.queue.mean(0)


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=0))
        return h * self.weight


class Statistics(nn.Module):
    """Its loss reads what the batch norm writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        normal: Tensor = self.norm(h.transpose(1, 2))
        assert self.norm.running_mean is not None
        return normal.transpose(1, 2) + self.norm.running_mean


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Grows, "replaces buffer 'parts.0.queue' of [2, 8] torch.float32 by one of [10, 8]"),
        (Weight, "writes into parameter 'parts.0.weight', which the optimizer owns"),
        (Statistics, "computes with 'parts.0.norm.running_mean', which a batch normalisation"),
    ],
)
def test_what_has_no_carry_is_refused_by_name(part: Any, said: str) -> None:
    with pytest.raises(MutationError) as refused:
        capture_of(partial(made_model, part), batch)
    assert said in str(refused.value)
