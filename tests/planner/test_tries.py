"""Which plans are tried, and which of them is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.nouns.plan import RunnerUp
from autopar.nouns.recompute import Recompute
from autopar.planner.advice.tries import Tried, kept, worth_trying
from tests.plans import plan

GIB = 2**30


def lost(step_time_s: float, zero: int | None = 0, **changes: Any) -> RunnerUp:
    given = {"degrees": {"dp_replicate": 4}, "recompute": Recompute(), "microbatches": 1, **changes}
    return RunnerUp(
        zero=zero, step_time_s=step_time_s, reason="slower",
        memory_bytes=given.pop("memory_bytes", 0), **given,
    )  # fmt: skip


def test_the_fastest_that_fit_are_tried_each_layout_once() -> None:
    limit = plan().prediction.memory_bytes.limit
    runners_up = (
        lost(4.0, degrees={"dp_shard": 2, "tp": 2}, microbatches=2, zero=3),
        lost(2.0, degrees={"tp": 2, "pp": 2}, microbatches=4),
        lost(2.5, degrees={"tp": 2, "pp": 2}, microbatches=4, recompute=Recompute("full")),
        lost(1.0, degrees={"tp": 2}, memory_bytes=limit + 1),
        lost(1.5, zero=None, recompute=None),
    )
    chosen = worth_trying(replace(plan(), runners_up=runners_up), 64, 2)
    assert [(c.tp, c.pp, c.dp_shard, c.zero, c.microbatch) for c in chosen] == [
        (2, 2, 1, 0, 16),
        (2, 1, 2, 3, 16),
    ]
    assert len(worth_trying(replace(plan(), runners_up=runners_up), 64, 1)) == 1


def test_the_plan_itself_is_not_tried_again() -> None:
    made = plan()
    same = lost(
        2.0, zero=made.stages[0].zero, degrees=dict(made.degrees), recompute=Recompute("full")
    )
    assert worth_trying(replace(made, runners_up=(same,)), 64, 3) == []


def test_the_fastest_as_measured_is_kept() -> None:
    slow, fast = Tried("a", 1.0, (1.2, 1.3)), Tried("b", 1.1, (1.1, 1.15))
    assert kept([slow, fast]) == 1
    assert kept([slow, replace(slow, layout="c")]) == 0
    assert abs(slow.noise - 0.1 / 1.25) < 1e-12
