"""Batches of other sizes: how they are cut, and which losses can be told; no processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.nouns.errors import UserError
from autopar.pipeline.actions import Action
from autopar.pipeline.schedules.table import schedule
from autopar.runtime.pytorch.pipeline.forwards import forwards_of
from autopar.runtime.pytorch.portions import even_split, portions
from autopar.runtime.shared.loss_share import LossShare, UnevenBatch, loss_share
from autopar.runtime.shared.planned_batch import OtherBatch
from tests.plans import cluster
from tests.script.models import Points, Words, points, words


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_are_even_and_make_up_the_whole(total: int, parts: int) -> None:
    cut = [even_split(total, parts, i) for i in range(parts)]
    assert [place for part in cut for place in part] == list(range(total))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4))
def test_weighted_shares_of_unequal_pieces_add_up_to_the_mean(
    samples: int, width: int, count: int
) -> None:
    values = torch.arange(1.0, samples + 1, dtype=torch.float64)
    planned = width * count * 5
    for written in (True, False):
        share, total = LossShare("mean", written), 0.0

        def weigh(rows: int, share: LossShare = share) -> float:
            return share.weight(rows, samples, planned)

        for place in range(width):
            mine = even_split(samples, width, place)
            cut = portions({"x": values}, mine, count, ["x"], weigh, lambda _, value: value)
            for part in cut.microbatches:
                assert len(part["x"]) > 0
                divisor = planned if written else len(part["x"])
                total += float(part["x"].sum() / divisor) * part.weight
        assert total == pytest.approx(float(values.mean()), rel=1e-12)


class Penalised(Points):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = super().forward(x, y) + 0.1 * self.up.weight.square().sum()
        return loss


class Scaled(Points):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (self.down(self.up(x)) - y).square().sum() / 64
        return loss


class Summed(Points):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (self.down(self.up(x)) - y).square().sum()
        return loss


class Weighed(Points):
    """By what no sample changes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * torch.exp(self.up.weight.mean())


class WeighedSum(Summed):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * (self.up.weight.mean() / 64)


class Contrastive(Points):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.down(self.up(x)) @ y.T
        return F.cross_entropy(scores, torch.arange(len(x), device=x.device))


class Normed(Points):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.norm(x), y)


class NormedAlone(Normed):
    """By statistics without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)


def folder_of(make: type[nn.Module], tmp_path: Path, fix: Any = (), devices: int = 1) -> Any:
    data = words if issubclass(make, Words) else points
    return autopar.plan(make, data(8), cluster(devices), fix, tmp_path / "plan")


@pytest.mark.parametrize(
    ("make", "fix", "share"),
    [
        (Words, {}, LossShare("counts", False)),
        (Points, {}, LossShare("mean", False)),
        (Points, {"dp_shard": 2}, LossShare("mean", True)),
        (Points, {"dp_replicate": 2, "microbatch": 2}, LossShare("mean", True)),
        (Summed, {}, LossShare("sum", False)),
        (Weighed, {"dp_replicate": 2, "microbatch": 2}, LossShare("mean", True)),
    ],
)
def test_what_a_loss_divides_by(
    make: type[nn.Module], fix: dict[str, int], share: LossShare, tmp_path: Path
) -> None:
    assert loss_share(folder_of(make, tmp_path, fix, 2 if fix else 1).folder) == share


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Penalised, "adds mul once to a sum over the batch"),
        (Scaled, "may stand for the batch's size"),
        (WeighedSum, "may stand for the batch's size"),
        (Contrastive, "does not treat its samples apart"),
    ],
)
def test_a_loss_that_other_sizes_leave_open_is_refused(
    make: type[nn.Module], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnevenBatch, match=reason):
        loss_share(folder_of(make, tmp_path).folder)


@pytest.mark.parametrize("make", [Normed, NormedAlone])
def test_evaluation_takes_running_statistics_and_training_no_other_size(
    make: type[nn.Module], tmp_path: Path
) -> None:
    trainer: Any = autopar.load(folder_of(make, tmp_path), model=make)
    trainer.step(points(8))
    model = make()
    for held in trainer.held:
        model.get_parameter(held.name).data.copy_(held.leaf)
    for name, buffer, _ in trainer.storage.buffers():
        model.get_buffer(name).copy_(buffer)
    before = [buffer.clone() for _, buffer, _ in trainer.storage.buffers()]
    model.eval()
    for size in (1, 8, 19):
        with torch.no_grad():
            wanted = float(model(**points(size, 3)))
        assert float(trainer.evaluate(points(size, 3))) == pytest.approx(wanted, rel=1e-6)
    assert all(map(torch.equal, before, (b for _, b, _ in trainer.storage.buffers())))
    with pytest.raises(UnevenBatch, match=r"7 samples instead of 8: .*batch_norm"):
        trainer.step(points(7))


def test_more_samples_than_were_planned_are_for_evaluation_alone(tmp_path: Path) -> None:
    trainer: Any = autopar.load(folder_of(Words, tmp_path), model=Words)
    with pytest.raises(OtherBatch, match="a step has 9 samples, and at most 8 were planned"):
        trainer.step(words(9))
    assert float(trainer.evaluate(words(9))) > 0
    other: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
        (lambda b: b.pop("targets"), r"batch\['targets'\] is missing"),
        (lambda b: b.update(targets=b["targets"][:, :3]), r"int64 \[samples, 3\]"),
        (lambda b: b.update(tokens=b["tokens"][:4]), "different numbers of samples"),
    ]
    for change, text in other:
        batch = words(5)
        change(batch)
        with pytest.raises(UserError, match=text):
            trainer.evaluate(batch)


def test_a_program_that_names_its_number_of_samples_takes_no_other(tmp_path: Path) -> None:
    made = folder_of(Points, tmp_path)
    file = made.folder / "program" / "model.py"
    last = 'the loss."""\n'
    assert last in file.read_text()
    file.write_text(file.read_text().replace(last, f"{last}        x = x.view(8, 3)\n"))
    trainer: Any = autopar.load(made, model=Points)
    trainer.step(points(8))
    with pytest.raises(UnevenBatch, match="RuntimeError with 9 samples: shape"):
        trainer.evaluate(points(5))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "chimera", "zb-v"])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_forwards_alone_stand_in_an_order_that_no_rank_waits_in(name: str, count: int) -> None:
    made = schedule(name, 2, 4, 2 if "interleaved" in name else 1)
    lists = forwards_of(made.lists, 4, count)
    every = sorted(a for actions in lists for a in actions)
    stages = {i: sorted(a.stage for a in every if a.microbatch == i) for i in range(count)}
    assert all(
        stages[i]
        == sorted(
            a.stage for own in made.lists for a in own if a.kind == "F" and a.microbatch == i % 4
        )
        for i in range(count)
    )
    done: set[Action] = set()
    places = [0] * len(lists)
    while any(place < len(own) for place, own in zip(places, lists, strict=True)):
        moved = False
        for rank, own in enumerate(lists):
            while places[rank] < len(own):
                stage, _, i = own[places[rank]]
                if any(s < stage and Action(s, "F", i) not in done for s in stages[i]):
                    break
                done.add(own[places[rank]])
                places[rank] += 1
                moved = True
        assert moved, "every rank waits"
