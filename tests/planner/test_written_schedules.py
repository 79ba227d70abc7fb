"""Schedules that are found under a memory limit, and those that stand in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.nouns.errors import UserError
from autopar.nouns.layout import LayoutError
from autopar.pipeline.actions import Action, Schedule, from_text, to_text
from autopar.pipeline.check import Deadlock, check, held
from autopar.pipeline.play import Costs, play
from autopar.pipeline.refine import refined
from autopar.pipeline.schedules.of_plan import schedule_of
from autopar.pipeline.schedules.table import schedule
from autopar.pipeline.written import read_schedule, written
from autopar.planner.ask.pins import read_pins
from autopar.planner.ask.question import Answer, Question
from autopar.planner.search.layouts import search_plan
from tests import plans
from tests.planner.graphs import gpt
from tests.planner.test_search import LARGE, NODE, question


def asked(fix: dict[str, str]) -> Question:
    return question(gpt(layers=4, **{**LARGE, "b": 16}), 16, NODE, fix)


def kept(best: Answer) -> tuple[float, ...]:
    """What ranks hold, by the schedule that the plan of an answer has."""
    plan = plans.plan(
        spreads=(best.decided.spread,),
        stages=best.decided.stages,
        microbatches=best.decided.candidate.microbatches,
        schedule=best.decided.schedule,
        actions=best.decided.actions,
    )
    made = schedule_of(plan)
    check(made)
    assert to_text(made.lists) == "\n".join(best.decided.actions)
    return held(made)


def test_found_is_no_slower_than_the_schedules_by_name() -> None:
    fix = {"pp": "4", "tp": "2", "microbatch": "2", "recompute": "none"}
    best = search_plan(asked({**fix, "schedule": "found"})).best
    assert best.decided.schedule == "found"
    named = [
        search_plan(asked({**fix, "schedule": name})).best.priced.time.total_s
        for name in ("1f1b", "zb-h1", "zb-h2")
    ]
    assert best.priced.time.total_s <= min(named) * (1 + 1e-9)
    assert max(kept(best)) <= 16


def test_found_holds_less_where_memory_is_short() -> None:
    of = asked({"pp": "4", "tp": "2", "microbatch": "1", "recompute": "none", "schedule": "found"})
    roomy = search_plan(of).best
    group = NODE.groups[0]
    limit = int(roomy.priced.memory.total * 0.97)  # which another order of the same stages keeps to
    tight = replace(group, device=replace(group.device, memory_bytes=limit))
    best = search_plan(replace(of, cluster=replace(NODE, groups=(tight,)))).best
    assert best.priced.memory.total <= limit
    assert max(kept(best)) <= max(kept(roomy))
    assert best.priced.time.total_s >= roomy.priced.time.total_s


def test_a_file_of_actions_is_the_schedule(tmp_path: Path) -> None:
    named = schedule("zb-v", 2, 4)
    path = tmp_path / "mine.txt"
    path.write_text(to_text(named.lists) + "\n")
    assert read_schedule(path).ranks == named.ranks
    by_file = search_plan(asked({"schedule": str(path), "recompute": "none"})).best
    by_name = search_plan(asked({"pp": "2", "schedule": "zb-v", "recompute": "none"})).best
    assert by_file.decided.pp == 2
    assert by_file.decided.candidate.microbatches == 4
    assert by_file.decided.schedule == "mine.txt"
    assert by_file.priced.time.total_s >= by_name.priced.time.total_s * (1 - 1e-9)
    kept(by_file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no actions"),
        ("0F0 0X0", "'0X0' is no action"),
        ("0F0 0B0\n2F0 2B0", "nothing of stage 1"),
        ("0F0 1F0 0B0\n1B0", "stage 1 stands in line 1 and, with 1B0, in line 2"),
        ("0F0 0B0 0F1 0B1\n1F0 1B0", "lacks 1F1"),
        ("0F0 0F0 0B0\n1F0 1B0", "0F0 stands 2 times"),
    ],
)
def test_files_that_are_no_schedule(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=f"mine.txt: .*{says}"):
        read_pins({"schedule": str(path)}, 8)


def test_a_deadlock_names_its_circle(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1")
    with pytest.raises(Deadlock, match=r"0B0 \(rank 0\) waits for .*1F1 \(rank 1\)"):
        read_pins({"schedule": str(path)}, 8)


def test_pins_that_a_file_contradicts(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(to_text(schedule("1f1b", 2, 3).lists))
    with pytest.raises(UserError, match="cannot be read"):
        read_pins({"schedule": str(tmp_path / "none.txt")}, 8)
    with pytest.raises(LayoutError, match="actions of 2 pipeline ranks; leave pp out"):
        read_pins({"schedule": str(path), "pp": "4"}, 8)
    with pytest.raises(LayoutError, match="says which stages a rank has"):
        read_pins({"schedule": str(path), "interleave": "2"}, 8)
    with pytest.raises(LayoutError, match="3 microbatches, which the batch of 16 samples"):
        search_plan(asked({"schedule": str(path)}))
    with pytest.raises(LayoutError, match="or a file of actions"):
        read_pins({"schedule": "sideways", "pp": "2"}, 8)
    assert written("x", from_text("0F0 0B0")).ranks == (0,)


def test_refined_lists_are_shorter_and_keep_the_limit() -> None:
    made = schedule("1f1b", 3, 4)

    def time_s(action: Action) -> float:
        return {"F": 1.0, "B": 2.0}[action.kind]

    def step_s(lists: Schedule) -> float:
        return play(lists, Costs(time_s, lambda a, b: 0.25)).step_s

    again = refined(made, [4, 4, 4], time_s, lambda a, b: 0.25)
    check(again)
    assert again.actions == made.actions
    assert step_s(again) <= step_s(made)
    tight = refined(made, [2, 2, 1], time_s, lambda a, b: 0.25)
    check(tight)
    assert all(a <= b for a, b in zip(held(tight), (3, 2, 1), strict=True))
