# mypy: disable-error-code="no-any-return"
"""The classes of a pipeline's stages: their names, what they say they hold, and which are one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.headings import state_held
from autopar.emit.pytorch import emit
from autopar.emit.pytorch.stages import _class_name
from autopar.emit.schedule import schedule_file
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, Stage
from autopar.nouns.recompute import Recompute
from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.of_plan import lists_of
from autopar.pipeline.schedules.table import schedule
from tests.emit.harness import capture_of, emitted
from tests.plans import plan


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.leave = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x).square().mean()


@cache
def program(*firsts: str, schedule: str = "1f1b") -> str:
    """With a stage from each op of ``firsts`` on; the last stage is in half of `leave`."""
    made = emitted(
        capture_of(Deep, lambda: {"x": torch.zeros(8, 4, 8)}), Spread(Mesh((), ())), microbatches=4
    )
    stages = tuple(Stage(first=f, device=i) for i, f in enumerate(("", *firsts)))
    of = replace(made.plan, stages=stages, schedule=schedule)
    return emit(made.lowered, of, made.captured)["model.py"]


def test_each_stage_recomputes_what_its_rank_must() -> None:
    made = emitted(
        capture_of(Deep, lambda: {"x": torch.zeros(8, 4, 8)}), Spread(Mesh((), ())), microbatches=4
    )
    kinds = ("full x 1 + selective-op", "none", "compute", "selective-op")
    firsts = ("", "layers.2/block", "layers.3/block", "layers.4/block")
    stages = [
        Stage(first=f, device=i, recompute=Recompute.parse(kinds[i])) for i, f in enumerate(firsts)
    ]
    text = emit(
        made.lowered, replace(made.plan, stages=tuple(stages), schedule="1f1b"), made.captured
    )["model.py"]
    called = re.compile(r"(layer|self.layers\[.*\])(, x.*|\(x)\)")
    assert [line.strip() for line in text.splitlines() if called.search(line)] == [
        "x = recompute(layer, x, keep_products=i >= 1)",
        'return self.layers["2"](x)',
        'return recompute(self.layers["3"], x, keep_collectives=True)',
        "x = recompute(layer, x, keep_products=True)",
    ], text


def test_stages_say_what_they_hold_and_where() -> None:
    text = program("layers.2/block", "layers.4/block", "leave.2/linear")
    for line in (
        '"""Stage 0 on rank 0: enter, layers.0 to 1."""',
        '"""Stage 1 on rank 1: layers.2 to 3."""',
        '"""Stage 2 on rank 2: layers.4 to 5, leave.0 to 1."""',
        '"""Stage 3 on rank 3: leave.2, the loss."""',
    ):
        assert line in text, text
    assert "Stage(Stage3, rank=3" in text


def test_what_each_rank_does_stands_beside_the_program_and_reads_back() -> None:
    made = plan(
        stages=tuple(Stage(first=str(i), device=i) for i in range(4)),
        schedule="1f1b",
        microbatches=40,
        spreads=(Spread(Mesh((), ())),),
    )
    text = schedule_file(made)
    assert "F is its forward, B its backward." in text
    assert lists_of(made, text) == schedule("1f1b", 4, 40).lists
    late = text.replace("0F0 0F1", "0F1 0F0")
    assert lists_of(made, late) != lists_of(made, text)
    for wrong, why in (
        (text.replace("0F1 ", "", 1), "0F1"),
        (text.replace("3F0 3B0", "3B0 3F0"), "3B0"),
    ):
        with pytest.raises(ScheduleError, match=why):
            lists_of(made, wrong)


@pytest.mark.parametrize("firsts", [("1", "3", "5"), ("1", "2", "3")])
def test_stages_that_differ_in_their_layers_are_one_class(firsts: tuple[str, ...]) -> None:
    text = program(*(f"layers.{i}/block" for i in firsts))
    assert "class Stages1To2(nn.Module):\n" in text, text
    assert "    Stage 2 on rank 2: layers.3" in text or "    Stage 2 on rank 2: layers.2." in text
    given = ("layers=range(3, 5)",) if firsts[1] == "3" else ('layer="1"', 'layer="2"')
    for one in given:
        assert f"lambda: Stages1To2({one})" in text, text


@pytest.mark.parametrize(
    ("stages", "name"),
    [((2,), "Stage2"), ((0, 7), "Stages0And7"), ((1, 2, 3, 6), "Stages1To3And6")],
)
def test_names_of_stages(stages: tuple[int, ...], name: str) -> None:
    assert _class_name(stages) == name


@pytest.mark.parametrize(
    ("mesh", "zero", "held"),
    [
        ("", 0, "the one rank holds all of it"),
        ("dp_replicate=4", 0, "every rank holds all of it"),
        ("tp=4", 0, "each rank holds its pieces of the state"),
        (
            "dp_replicate=2 x tp=2",
            0,
            "each rank holds its pieces of the state; data ranks hold the",
        ),
        ("dp_shard=2 x tp=2", 2, "gradients and optimizer state are split over dp_shard"),
        ("tp=2", 2, "each rank holds its pieces of the state"),
    ],
)
def test_what_is_said_of_state_follows_from_the_mesh(mesh: str, zero: int, held: str) -> None:
    of = plan(spreads=(Spread(Mesh.parse(mesh)),), stages=(Stage(zero=zero),))
    assert state_held(of).startswith(held)
