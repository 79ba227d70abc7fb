# mypy: disable-error-code="no-any-return"
"""Rows that a mask chooses, as so many of each sample: visible patches, the end of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.pytorch import capture, errors
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.row_places import row_places
from autopar.runtime.shared.settings import ProgramError
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

B, S, D, END = 8, 6, 4, 3
Body = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(10, D), nn.Parameter(torch.randn(1, S, D))
        self.layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Sequential(nn.Linear(D, D))
        self.body = body

    def forward(self, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
        return self.body(self, ids, x, hidden)


def batch() -> dict[str, Tensor]:
    """Each sample has one end, and two patches that are hidden."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 10, (B, S), generator=generator)
    ids[torch.arange(B), torch.randint(0, S, (B,), generator=generator)] = END
    hidden = torch.rand(B, S, generator=generator).argsort(1) < 2
    return {"ids": ids, "x": torch.randn(B, S, D, generator=generator), "hidden": hidden}


def _ends(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    """As transformers' BART classifies sequences, which also looks whether it may."""
    words, mask = m.embed(ids) + m.places, ids.eq(END)
    torch._check(torch.unique_consecutive(mask.sum(1)).numel() == 1)  # type: ignore[no-untyped-call]
    chosen = words[mask, :]
    torch._check(chosen.shape[0] // words.shape[0] >= 1)  # type: ignore[no-untyped-call]
    last = chosen.view(words.size(0), -1, words.size(-1))[:, -1, :]
    return m.head(last).square().mean()


def _visible(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    """As transformers' VideoMAE."""
    places = m.places.expand(B, -1, -1)
    seen = m.layer((x + places)[~hidden].reshape(B, -1, D))
    wanted = x[hidden].reshape(B, -1, D)
    tokens = torch.cat(
        [seen + places[~hidden].reshape(B, -1, D), places[hidden].reshape(B, -1, D)], 1
    )
    return F.mse_loss(m.head(tokens[:, -wanted.shape[1] :]), wanted)


def _in_a_square(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    """By a mask of three dims, of numbers."""
    mask = torch.stack([hidden, ~hidden], 1)
    chosen = torch.stack([x, x.cos()], 1)[mask].view(B, S, D)
    return m.head(chosen).sin().mean()


def _added(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    """As transformers' Qwen3-VL adds what it sees of images to the tokens that stand for them."""
    words, seen = m.embed(ids), m.head(x[:, :2]).flatten(0, 1)
    words = words.clone()
    words[hidden, :] = words[hidden, :] + seen
    words[hidden, :] = seen.tanh() * words[hidden, :].clone()
    words[hidden] = seen - words[hidden]
    return m.layer(words).square().mean()


@pytest.mark.parametrize("body", [_ends, _visible, _in_a_square, _added])
def test_losses_and_gradients_are_those_of_one_device(body: Body) -> None:
    made = capture_of(lambda: Model(body), batch)
    for seed, mesh in enumerate(("tp=2", "dp_shard=2 x tp=2", "dp_replicate=4")):
        program = emitted(made, random_stage(made, Mesh.parse(mesh), 1, seed))
        assert "row_places(" in program.text
        check(program, Model(body), batch())


def _crossed(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    return x[hidden].view(B // 2, -1, D).mean()


def _of_a_parameter(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    return x[m.head(x) > 0].view(B, -1, 1).mean()


def _written_between(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    words = m.head(x)
    rows = words[hidden]
    words.mul_(2)
    return rows.view(B, -1, D).sum(1).mean()


def _rows_written(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    rows = m.head(x)[hidden].clone()
    rows += 1
    return (rows + m.head(x[:, :2]).flatten(0, 1)).mean()


def _blanked(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    words = m.head(x).clone()
    rows = words[hidden]
    words[hidden] = 0.0
    return (words[:, :2] + (rows + x[:, :2].flatten(0, 1)).view(B, 2, D)).mean()


def _view_written(m: Model, ids: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    rows = m.head(x)[hidden]
    rows.view(B, -1, D).mul_(3)
    return rows.sum() / 7


@pytest.mark.parametrize("body", [_written_between, _rows_written, _blanked, _view_written])
def test_rows_that_are_written_in_between_are_refused(body: Body) -> None:
    with pytest.raises((errors.UnsupportedOpError, errors.MutationError)):
        capture(Workload(model=partial(Model, body), batch=batch))


def test_what_has_not_as_many_in_each_sample_is_refused() -> None:
    def uneven() -> dict[str, Tensor]:
        made = batch()
        made["hidden"][0] = True
        return made

    several = ((_visible, uneven), (_crossed, batch), (_of_a_parameter, batch), (_added, uneven))
    for body, of in several:
        with pytest.raises((errors.UnsupportedOpError, errors.DataDependentError), match="mask"):
            capture(Workload(model=partial(Model, body), batch=of))


def test_a_batch_may_seed() -> None:
    """As no forward may."""

    def seeded() -> dict[str, Tensor]:
        torch.manual_seed(1)
        return {**batch(), "x": torch.randn(B, S, D)}

    graph = capture(Workload(model=partial(Model, _visible), batch=seeded)).graph
    assert {op.attrs["count"] for op in graph.ops if op.kind == "row_places"} == {2, S - 2}


def test_a_batch_with_other_numbers_is_told() -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]])
    assert row_places(mask, 2).tolist() == [[0, 2], [1, 2]]
    with pytest.raises(ProgramError, match=r"chooses 2 places of a sample, .* made for 1 of each"):
        row_places(mask, 1)
