"""Schedules run without deadlock, hold what they should, and take what theory says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.schedule import Action, parse, schedule, show
from autopar.cost_models.simulator import Deadlock, play

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def seconds(action: Action) -> float:
    return UNIT[action.kind]


def test_actions_read_back() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("2F0") == Action(2, "F", 0)
    with pytest.raises(ValueError, match="no action"):
        Action.parse("F20")


def test_golden_1f1b() -> None:
    assert show(schedule("1f1b", 2, 3)) == ("0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]), st.integers(1, 6), st.integers(1, 12))
def test_every_schedule_runs_all_work_once(name: str, pp: int, microbatches: int) -> None:
    program = schedule(name, pp, microbatches)
    assert parse(show(program)) == program
    played = play(program, seconds)
    assert len(played.spans) == sum(map(len, program))
    assert sum(played.busy_s) == pytest.approx(3.0 * pp * microbatches)
    assert played.total_s >= 3.0 * microbatches


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_takes_the_textbook_time(pp: int, microbatches: int) -> None:
    played = play(schedule("1f1b", pp, microbatches), seconds)
    assert played.total_s == pytest.approx((microbatches + pp - 1) * 3.0)
    assert played.in_flight[0] == min(pp, microbatches)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 3))
def test_interleaving_divides_the_bubble(pp: int, groups: int, v: int) -> None:
    microbatches = pp * groups
    played = play(schedule("interleaved", pp, microbatches, v), lambda a: seconds(a) / v)
    assert played.total_s == pytest.approx(3.0 * (microbatches + (pp - 1) / v))


def test_zero_bubble_beats_1f1b() -> None:
    plain = play(schedule("1f1b", 4, 12), seconds)
    split = play(schedule("zero_bubble", 4, 12), seconds)
    assert split.total_s < plain.total_s
    assert max(split.in_flight) <= max(plain.in_flight)


def test_sends_delay_the_fill() -> None:
    program = schedule("gpipe", 3, 2)
    assert play(program, seconds, 0.5).total_s > play(program, seconds).total_s


def test_a_schedule_that_cannot_run_is_named() -> None:
    with pytest.raises(Deadlock, match="rank 0 waits at 0B0 for 1B0"):
        play(parse("0F0 0B0\n1B0 1F0"), seconds)
