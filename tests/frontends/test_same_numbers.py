# mypy: disable-error-code="no-any-return,no-untyped-call,return-value"
"""Sizes that a model reads from the batch, and that every sample has alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch import capture, errors
from autopar.nouns.batch import from_json, to_json
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.portions import check_numbers
from autopar.runtime.shared.planned_batch import OtherBatch
from autopar.runtime.shared.settings import Settings
from autopar.runtime.verify.pytorch.reference import random_batch
from tests.emit.harness import capture_of, check, emitted, load
from tests.emit.random_stage import random_stage

B, D, H, W = 4, 4, 2, 3
Body = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Asks for itself, of what it computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        lengths = (grid[:, 0] * grid[:, 1]).tolist()
        pieces = x.flatten(0, 1).split(lengths)
        return torch.cat([self.inner(piece).tanh() for piece in pieces]).view_as(x)


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(D, D), nn.Conv2d(D, D, 3, padding=1)
        self.head, self.body = nn.Linear(D, 5), body
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, grid: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self, self.inner(x), grid, y)), y)


def batch() -> dict[str, Tensor]:
    """Images of one size; answers that are alike, too, as those of a batch of zeros."""
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(B, H * W, D, generator=generator),
        "grid": torch.tensor([[H, W]] * B),
        "y": torch.ones(B, dtype=torch.int64),
    }


def _listed(m: Model, x: Tensor, grid: Tensor, y: Tensor) -> Tensor:
    h, w = grid[0, :2].tolist()
    return m.seen(x.transpose(1, 2).reshape(-1, D, h, w)).mean((2, 3))


def _one_by_one(m: Model, x: Tensor, grid: Tensor, y: Tensor) -> Tensor:
    """Every number by itself, in shapes, in Python, and in slices."""
    h, w = grid[0]
    x = x.transpose(1, 2).reshape(x.shape[0], D, h, w)
    x = x[..., :h, : w.item()] + torch.arange(w).to(x)
    if h > w:
        return m.seen(x).amax((2, 3))
    return sum(x[:, :, i].mean(2) for i in range(h)) / int(h)


def _by_counts(m: Model, x: Tensor, grid: Tensor, y: Tensor) -> Tensor:
    """As many rows of a table as each side has, by numbers that follow from the sizes."""
    places = torch.repeat_interleave(torch.arange(2), grid[0])
    return (x[:, : len(places)] * places[None, :, None]).sum(1)


def _both(m: Model, x: Tensor, grid: Tensor, y: Tensor) -> Tensor:
    """How many are labelled stays a number of each batch."""
    h, w = grid[0].tolist()
    labelled = (y != -100).sum().item()
    return x.unflatten(1, (h, w)).mean((1, 2)) / max(labelled, 1)


def _in_layers(m: Model, x: Tensor, grid: Tensor, y: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x, grid)
    return x.mean(1)


BODIES = (_in_layers, _listed, _one_by_one, _by_counts, _both)


@pytest.mark.parametrize("body", BODIES)
def test_losses_and_gradients_are_those_of_one_device(body: Body) -> None:
    made = capture_of(lambda: Model(body), batch)
    assert {e.name: e.numbers for e in made.batch} == {"x": (), "grid": (H, W), "y": ()}
    assert any("grid [2, 3]" in note for note in made.notes)
    for seed, mesh in enumerate(("tp=2", "dp_shard=2 x tp=2", "dp_replicate=4")):
        program = emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed))
        assert load(program.text).SETTINGS.alike == {"grid": (H, W)}
        check(program, Model(body), batch())


def test_layers_that_ask_are_layers() -> None:
    made = capture_of(lambda: Model(_in_layers), batch)
    assert [op.kind for op in made.graph.ops].count("block") == 3
    assert len(made.graph.blocks) == 1


def test_a_plan_remembers_them() -> None:
    made = capture_of(lambda: Model(_listed), batch)
    assert from_json(to_json(made.batch)) == made.batch
    assert from_json(to_json(made.batch))[1].numbers == (H, W)

    def wider() -> dict[str, Tensor]:
        return {**batch(), "grid": torch.tensor([[W, H]] * B)}

    other = capture_of(lambda: Model(_listed), wider)
    assert other.fingerprint() != made.fingerprint()


def _changed(**entries: Tensor) -> Mapping[str, Tensor]:
    return {**batch(), **entries}


@pytest.mark.parametrize(
    "other",
    [
        _changed(grid=torch.tensor([[H, W]] * (B - 1) + [[W, H]])),
        _changed(grid=torch.full((B, 2), 2.0)),
        _changed(grid=torch.zeros(B, 65, dtype=torch.int64)),
    ],
    ids=["of several sizes", "of floats", "of many numbers"],
)
def test_what_is_not_alike_is_refused(other: Mapping[str, Tensor]) -> None:
    refusals = (errors.DataDependentError, errors.ForwardError)
    with pytest.raises(
        refusals, match=r"same few integers in every sample|'shape' failed to unpack"
    ):
        capture(Workload(model=partial(Model, _listed), batch=lambda: dict(other)))


def test_sizes_that_differ_are_told() -> None:
    other = {**batch(), "grid": torch.tensor([[H, W]] * (B - 1) + [[W, H]])}
    text = r"of grid the first sample has \[2, 3\], and sample 3 has \[3, 2\]"
    with pytest.raises(errors.DataDependentError, match=text):
        capture(Workload(model=partial(Model, _by_counts), batch=lambda: dict(other)))


def test_a_batch_of_another_size_is_told() -> None:
    settings = Settings(alike={"grid": (H, W)})
    check_numbers("grid", batch()["grid"], settings)
    check_numbers("x", batch()["x"], settings)
    other = torch.tensor([[H, W], [H, W], [W, H]])
    with pytest.raises(OtherBatch, match=r"\[3, 2\] at sample 2, .* every sample has \[2, 3\]"):
        check_numbers("grid", other, settings)


def test_verification_keeps_them() -> None:
    workload = Workload(model=partial(Model, _listed), batch=batch)
    kept = random_batch(workload, kept=["grid"])
    assert torch.equal(kept["grid"], batch()["grid"])
    assert not torch.equal(kept["x"], batch()["x"].double())
