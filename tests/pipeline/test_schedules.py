"""Every schedule is proven, takes and holds what its paper says, and refuses what cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline.actions import Action, Schedule, ScheduleError, from_text, one_route, to_text
from autopar.pipeline.check import Deadlock, check, held
from autopar.pipeline.greedy import Setting, shortest
from autopar.pipeline.play import Costs, play
from autopar.pipeline.schedules.table import SCHEDULES, schedule

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def unit(action: Action) -> float:
    return UNIT[action.kind]


def bubble_of(made: Schedule) -> tuple[float, float]:
    """Step time less work, and rank 0's wait between its first and last action; for one stage."""
    timeline = play(made, Costs(unit))
    spans = timeline.compute().values()
    mine = [s for s in spans if s.rank == 0]
    inside = max(s.end_s for s in mine) - min(s.start_s for s in mine) - timeline.busy_s[0]
    stages = len(made.ranks) / len(made.lists)
    return (timeline.step_s - timeline.busy_s[0]) / stages, inside / stages


def test_actions_read_back() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("2F0") == Action(2, "F", 0)
    with pytest.raises(ScheduleError, match="no action"):
        Action.parse("F20")


GOLDEN = {
    "gpipe": "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2",
    "1f1b": "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2",
    "eager-1f1b": "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2",
    "zb-h1": "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    "zb-v": (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2\n"
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_lists(name: str) -> None:
    assert to_text(schedule(name, 2, 3).lists) == GOLDEN[name]


def legal(name: str, pp: int, groups: int) -> tuple[int, int]:
    """Ranks and microbatches that the schedule can have."""
    kind = SCHEDULES[name]
    pp += kind.even_ranks and pp % 2
    return pp, max(pp * groups if kind.turns else groups + 1, kind.least(pp))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 9), st.integers(1, 3))
def test_every_schedule_is_one(name: str, pp: int, groups: int, interleave: int) -> None:
    pp, microbatches = legal(name, pp, groups)
    made = schedule(name, pp, microbatches, interleave if SCHEDULES[name].interleaves else 1)
    check(made)
    assert from_text(to_text(made.lists)) == made.lists
    work = sum(map(unit, made.actions))
    parts = len(made.routes[0])
    assert work == 3.0 * parts * microbatches
    assert play(made, Costs(unit)).step_s >= work / pp


Formula = Callable[[int, int, int], float]
BUBBLES: dict[str, Formula] = {  # of p, m, v: in F = I = W = 1, B = 2
    "gpipe": lambda p, m, v: 3 * (p - 1),
    "1f1b": lambda p, m, v: 3 * (p - 1),
    "eager-1f1b": lambda p, m, v: 3 * (p - 1),
    "interleaved-1f1b": lambda p, m, v: 3 * (p - 1) / v,
    "breadth-first": lambda p, m, v: 3 * (p - 1) / v,
    "zb-h1": lambda p, m, v: p - 1,
    "zb-h2": lambda p, m, v: p - 1,
    "zb-interleaved": lambda p, m, v: (p - 1) / v,
    "zb-v": lambda p, m, v: (p - 1) / 2,
    "dualpipe-v": lambda p, m, v: (p - 1) / 2,
}
HELD: dict[str, Formula] = {  # by the fullest rank, in whole microbatches
    "gpipe": lambda p, m, v: m,
    "1f1b": lambda p, m, v: p,
    "eager-1f1b": lambda p, m, v: 2 * p - 1,
    "interleaved-1f1b": lambda p, m, v: p + (p - 1) / v if v > 1 else p,
    "breadth-first": lambda p, m, v: m,
    "zb-h1": lambda p, m, v: p,
    "zb-h2": lambda p, m, v: 2 * p - 1,
    "zb-interleaved": lambda p, m, v: p,
    "zb-v": lambda p, m, v: p,
    "dualpipe-v": lambda p, m, v: p + 0.5,
    "hanayo": lambda p, m, v: p,
    "chimera": lambda p, m, v: p,
}


@pytest.mark.parametrize("name", BUBBLES)
@pytest.mark.parametrize(("pp", "groups", "v"), [(2, 2, 2), (3, 4, 2), (4, 3, 3), (8, 4, 2)])
def test_the_bubble_is_the_closed_formula(name: str, pp: int, groups: int, v: int) -> None:
    kind = SCHEDULES[name]
    v = v if kind.interleaves else 1
    made = schedule(name, pp, pp * groups, v)
    assert bubble_of(made)[0] == pytest.approx(BUBBLES[name](pp, pp * groups, v))


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
@pytest.mark.parametrize("pp", [2, 3, 5, 8])
def test_no_rank_waits_inside_a_zero_bubble(name: str, pp: int) -> None:
    assert bubble_of(schedule(name, pp, 3 * pp))[1] == 0


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize(("pp", "groups", "v"), [(2, 4, 2), (4, 3, 3), (8, 2, 2)])
def test_what_ranks_hold_is_the_closed_formula(name: str, pp: int, groups: int, v: int) -> None:
    v = v if SCHEDULES[name].interleaves else 1
    for m in (pp * groups, 2 * pp * groups):
        made = schedule(name, pp, m, v)
        most = max(held(made)) * len(made.lists) / len(made.routes[0])
        assert most == pytest.approx(HELD[name](pp, m, v))


@pytest.mark.parametrize(("pp", "m"), [(4, 4), (4, 16), (8, 16), (8, 32)])
def test_waves_and_two_directions_wait_less_than_1f1b(pp: int, m: int) -> None:
    plain = bubble_of(schedule("1f1b", pp, m))[0]
    assert bubble_of(schedule("chimera", pp, m))[0] < plain
    one, two = (bubble_of(schedule("hanayo", pp, m, w))[0] for w in (1, 2))
    assert two < one < plain


def test_chimera_holds_every_part_twice() -> None:
    made = schedule("chimera", 4, 4)
    assert made.routes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [made.ranks[s] for s in made.routes[1]] == [3, 2, 1, 0]
    assert made.part[6] == 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_limits_are_kept_and_never_stop_a_play(data: st.DataObject) -> None:
    """Random placements of stages, random times, the tightest limits."""
    pp = data.draw(st.integers(1, 4))
    stages = data.draw(st.lists(st.integers(0, pp - 1), min_size=1, max_size=7))
    stages += [r for r in range(pp) if r not in stages]
    m = data.draw(st.integers(1, 6))
    limit = [max(1, stages.count(r)) + data.draw(st.integers(0, 3)) for r in range(pp)]
    took = data.draw(st.lists(st.integers(1, 5), min_size=len(stages), max_size=len(stages)))
    setting = Setting(
        stages,
        [range(len(stages))],
        [0] * m,
        limit,
        lambda a: float(took[a.stage]) * UNIT[a.kind],
        data.draw(st.booleans()),
    )
    made = one_route("played", tuple(stages), shortest(setting), m)
    check(made)
    assert all(have <= most for have, most in zip(held(made), limit, strict=True))


def test_a_limit_that_holds_no_microbatch_is_refused() -> None:
    setting = Setting([0, 1, 1, 0], [range(4)], [0], [2, 1], unit, False)
    with pytest.raises(ScheduleError, match="rank 1 may hold 1 stages' activations"):
        shortest(setting)


@pytest.mark.parametrize(
    ("name", "pp", "m", "v", "expected"),
    [
        ("1f2b", 4, 8, 1, "Did you mean 1f1b"),
        ("1f1b", 4, 8, 2, "has 1 stage a rank, not 2"),
        ("interleaved-1f1b", 4, 6, 2, "take 4 or 8, or breadth-first"),
        ("zb-interleaved", 4, 3, 2, "take 4, or"),
        ("zb-v", 4, 6, 1, "at least 7"),
        ("dualpipe-v", 4, 7, 1, "at least 8"),
        ("chimera", 3, 6, 1, "take 4 or 2 ranks"),
        ("chimera", 2, 1, 1, "at least 2"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    name: str, pp: int, m: int, v: int, expected: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule(name, pp, m, v)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ("0F0 0B0", "lacks 1F0"),
        ("0F0 0B0\n1F0 1B0 1B0", "1B0 stands 2 times"),
        ("0F0 0B0 1F0\n1B0", "1F0 stands on rank 0, and stage 1 lives on rank 1"),
        ("0F0 0B0 2F0\n1F0 1B0", "the last stage is 1"),
        ("0F0 0B0\n1F0 1I0", "lacks 1W0"),
        ("0F0 0B0\n1F0 1B0 1I0 1W0", "has 1B0"),
        ("0F0 0B0\n1F0 1B0 1F1", "has 1F1"),
    ],
)
def test_lists_that_are_no_schedule_are_told(lists: str, expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(one_route("mine", (0, 1), from_text(lists), 1))
    assert expected in str(caught.value)


def test_a_deadlock_names_its_circle() -> None:
    made = one_route("mine", (0, 1), from_text("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"), 2)
    with pytest.raises(Deadlock) as caught:
        check(made)
    text = str(caught.value)
    assert "0B0 (rank 0) waits for 1B0 (rank 1)" in text
    assert "1F1 (rank 1) waits for 0F1 (rank 0)" in text
