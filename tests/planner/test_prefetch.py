"""How many units ahead parameters are gathered: what it takes and holds, when it is chosen, what
may pin it, that programs compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.planner import plan
from autopar.planner.planning import PlanResult
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.pytorch import gathered_ahead
from tests.plans import gpus
from tests.sampling import some

MODEL = """
import dataclasses
import torch
from torch import nn
import autopar

D, S = 512, 64


class Small(nn.Module):
    def __init__(self, width=D, times=8):
        super().__init__()
        self.layer, self.times = nn.Linear(width, width), times

    def forward(self, x):
        for _ in range(self.times):
            x = x + self.layer(x).tanh()
        return x


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100 * D, D)
        self.layer = nn.Linear(D, D)

    def forward(self, x, ids):
        return x + self.layer(x + self.table(ids))


class Model(nn.Module):
    def __init__(self, large):
        super().__init__()
        self.small = nn.ModuleList(Small() for _ in range(8))
        self.large = nn.ModuleList(Large() for _ in range(4 if large else 0))

    def forward(self, x, ids):
        for i, layer in enumerate(self.small):
            x = layer(x)
            if i % 2 and self.large:
                x = self.large[i // 2](x, ids)
        return x.square().mean()


def workload(large):
    return autopar.Workload(
        model=lambda: Model(large), optimizer="sgd",
        batch=lambda: {"x": torch.randn(32, S, D), "ids": torch.zeros(32, S, dtype=torch.long)},
    )


alike, mixed = workload(False), workload(True)

# Those that processes on cores compute.
NARROW = 64


def short():
    return Small(NARROW, 2)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.ModuleList(short() for _ in range(8))

    def forward(self, x, ids):
        for layer in self.small:
            x = layer(x)
        return x.square().mean()


class Woven(nn.Module):
    # Two lists whose members take turns, the one that is called last declared first.
    def __init__(self, back):
        super().__init__()
        self.b = nn.ModuleList(nn.Linear(NARROW, NARROW, bias=False) for _ in range(4))
        self.a = nn.ModuleList(short() for _ in range(4))
        self.back = back

    def forward(self, x, ids):
        every = list(zip(self.a, self.b))
        for a, b in reversed(every) if self.back else every:
            x = a(x)
            x = b(x).relu() + x
        return x.square().mean()


class Taught(nn.Module):
    # Two lists; no gradient passes the second, which is called first or last.

    def __init__(self, last):
        super().__init__()
        self.a = nn.ModuleList(short() for _ in range(3))
        self.b = nn.ModuleList(short() for _ in range(3)).requires_grad_(False)
        self.last = last

    def taught(self, x):
        with torch.no_grad():
            for layer in self.b:
                x = layer(x)
        return x

    def forward(self, x, ids):
        wanted = None if self.last else self.taught(x)
        h = x
        for layer in self.a:
            h = layer(h)
        return (h - (self.taught(x) if self.last else wanted)).square().mean()


def other(model):
    return dataclasses.replace(
        alike, model=model,
        batch=lambda: {
            "x": torch.randn(32, 2, NARROW), "ids": torch.zeros(32, 2, dtype=torch.long)
        },
    )


class Late(nn.Module):
    # The first layers are frozen, and lie on a stage of their own.

    def __init__(self):
        super().__init__()
        self.b = nn.ModuleList(short() for _ in range(4)).requires_grad_(False)
        self.a = nn.ModuleList(short() for _ in range(4))

    def forward(self, x, ids):
        for layer in (*self.b, *self.a):
            x = layer(x)
        return x.square().mean()


late = other(Late)
small = other(Several)
woven, backwards = other(lambda: Woven(False)), other(lambda: Woven(True))
taught_first, taught_last = other(lambda: Taught(False)), other(lambda: Taught(True))
"""
GATHERED = {"dp_shard": "4", "zero": "3", "recompute": "none", "microbatch": "8"}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefetch")
    (folder / "model.py").write_text(MODEL)
    return folder


def planned(
    where: Path, model: str, gb_per_s: float = 450, prefetch: str = "", **fix: str
) -> PlanResult:
    pins = {**GATHERED, **fix, **({"prefetch": prefetch} if prefetch else {})}
    return plan(
        f"{where / 'model.py'}:{model}", gpus("H100", bandwidth_bytes_per_s=gb_per_s * 1e9), pins
    )


def test_further_ahead_takes_no_more_time_and_holds_one_unit_more(where: Path) -> None:
    made = [planned(where, "alike", 100, str(n)).plan.prediction for n in range(3)]
    times = [p.step_time_s for p in made]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[1]
    none, one, two = (p.memory_bytes.buffers for p in made)
    assert two - one == one - none == 4 * (512 * 512 + 512)


def test_two_ahead_are_chosen_where_small_units_stand_before_large_ones(where: Path) -> None:
    """At some bandwidth: below it gathers take all of the time anyway, above they take none."""
    chosen = {}
    for gb_per_s in (50, 100, 200, 400, 800, 1600, 3200):
        free = planned(where, "mixed", gb_per_s).plan
        one, two = (planned(where, "mixed", gb_per_s, n).plan for n in "12")
        one_s, two_s = (p.prediction.step_time_s for p in (one, two))
        assert (free.prefetch == 2) == (two_s <= 0.98 * one_s)
        assert free.prediction.step_time_s == (two_s if free.prefetch else one_s)
        assert free.prediction.lower_bound_s <= free.prediction.step_time_s
        chosen[gb_per_s] = free.prefetch
    assert 2 in chosen.values()
    assert None in chosen.values()
    assert planned(where, "alike", 100).plan.prefetch is None


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "whole parameters": ({"zero": "1", "prefetch": "2"}, "this layout keeps parameters whole"),
    "three": ({"prefetch": "3"}, "choose 0, 1 or 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_effect_is_an_error(where: Path, name: str) -> None:
    fix, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason):
        planned(where, "alike", 450, **fix)


class _Unit(nn.Module):
    """What `gather_ahead` says to it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.ahead, self.back = name, "", ""

    def set_modules_to_forward_prefetch(self, units: list[Any]) -> None:
        self.ahead = "".join(unit.name for unit in units)

    def set_modules_to_backward_prefetch(self, units: list[Any]) -> None:
        self.back = "".join(unit.name for unit in units)


@pytest.fixture
def in_line(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(
        gathered_ahead, "fsdp_gathers_in_line", lambda unit: names.append(unit.name)
    )
    return names


@pytest.mark.parametrize(
    ("ahead", "forward", "backward"),
    [
        (2, {"a": "bc", "b": "cd", "c": "d", "d": "", "r": "ab"}, ["a", "a", "ba", "cb"]),
        (0, dict.fromkeys("abcdr", ""), ["a", "b", "c", "d"]),
    ],
)
def test_units_are_gathered_in_the_order_of_their_calls(
    in_line: list[str], ahead: int, forward: dict[str, str], backward: list[str]
) -> None:
    units: list[Any] = [_Unit(name) for name in "abcdr"]
    gathered_ahead.gather_ahead(units, ahead)
    assert {unit.name: unit.ahead for unit in units} == forward
    assert [unit.back for unit in units[:4]] == backward
    assert in_line == ([] if ahead else list("abcdr"))


def test_none_is_gathered_for_a_backward_that_does_not_come() -> None:
    units: list[Any] = [_Unit(name) for name in "abcdr"]
    gathered_ahead.gather_ahead(units, 2, [units[1], units[3]])
    assert {unit.name: unit.back for unit in units} == {
        **{"a": "a", "b": "", "c": "a", "d": ""},
        "r": "c",
    }
    assert units[0].ahead == "bc"


def test_fsdp2_has_what_is_called() -> None:
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        assert callable(getattr(FSDPModule, name))
    assert callable(FSDPModule._set_unshard_async_op)


@pytest.mark.gloo
def test_programs_compute_the_same(where: Path) -> None:
    folders = []
    for i, fix in enumerate(
        (
            {"prefetch": "0"},
            {"prefetch": "2"},
            {"prefetch": "2", "recompute": "full", "dp_shard": "2", "dp_replicate": "2"},
            {"prefetch": "0", "dp_shard": "2", "pp": "2", "schedule": "1f1b", "microbatch": "4"},
            {"prefetch": "2", "dp_shard": "2", "pp": "2", "schedule": "zb-h1", "microbatch": "4"},
            {"prefetch": "2", "model": "woven"},
            {"prefetch": "2", "model": "backwards"},
            {"prefetch": "2", "model": "taught_first"},
            {"prefetch": "2", "model": "taught_last"},
            {"prefetch": "0", "model": "taught_last"},
            {"prefetch": "2", "model": "late", "dp_shard": "2", "pp": "2", "schedule": "1f1b"},
        )
    ):
        made = planned(where, fix.pop("model", "small"), 450, **fix)
        folders.append(where / f"plan{i}")
        plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
        assert (
            f"prefetch={fix['prefetch']}"
            in plan_folder.code_of(folders[-1], "model.py").read_text()
        )
    for result in verify_many(some(folders, 6)):
        assert result.passed
        assert result.collectives_match
        assert result.exact.largest < 1e-12
