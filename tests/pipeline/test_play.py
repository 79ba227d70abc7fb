"""The timeline against the longest path, and what links, reductions and memory make of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline.actions import Action, Schedule, from_text
from autopar.pipeline.check import held, order
from autopar.pipeline.play import Costs, Timeline, memory, play
from autopar.pipeline.schedules.table import SCHEDULES, schedule
from tests.pipeline.test_schedules import UNIT, legal


def longest_path(made: Schedule, took: Callable[[Action], float], send: float) -> float:
    """The end of the last action where every send has a link of its own."""
    end: dict[Action, float] = {}
    previous = {b: a for actions in made.lists for a, b in pairwise(actions)}
    for action in order(made):
        times = [0.0]
        if action in previous:
            times.append(end[previous[action]])
        for need in made.needs(action):
            away = made.ranks[need.stage] != made.ranks[action.stage]
            times.append(end[need] + send * away)
        end[action] = max(times) + took(action)
    return max(end.values())


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 6), st.data())
def test_the_step_is_the_longest_path(name: str, pp: int, groups: int, data: st.DataObject) -> None:
    pp, m = legal(name, pp, groups)
    made = schedule(name, pp, m, 2 if SCHEDULES[name].interleaves else 1)
    stages = len(made.ranks)
    times = data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    send = data.draw(st.integers(0, 3))

    def took(action: Action) -> float:
        return float(times[action.stage] * UNIT[action.kind])

    alone = iter(range(10**6))
    costs = Costs(took, lambda a, b: float(send), lambda a, b: next(alone))
    timeline = play(made, costs)
    assert timeline.step_s == longest_path(made, took, float(send))
    assert_streams_take_turns(timeline)


def assert_streams_take_turns(timeline: Timeline) -> None:
    ends: dict[tuple[int, str], float] = {}
    for span in sorted(timeline.spans, key=lambda s: (s.start_s, s.end_s)):
        if span.stream != "send":
            assert span.start_s >= ends.get((span.rank, span.stream), 0.0)
            ends[span.rank, span.stream] = span.end_s


def unit(action: Action) -> float:
    return UNIT[action.kind]


def test_uneven_stages_wait_for_the_slowest() -> None:
    def took(action: Action) -> float:
        return unit(action) * (3 if action.stage == 1 else 1)

    assert play(schedule("1f1b", 2, 8), Costs(took)).step_s == 8 * 9 + 1 + 2


def test_a_link_that_ranks_share_takes_turns() -> None:
    made = from_text("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1\n3F0 3F1 3B0 3B1")
    lists = tuple(tuple(a for a in actions if a.microbatch == (a.stage > 1)) for actions in made)
    two = Schedule("two", (0, 1, 2, 3), ((0, 1), (2, 3)), (0, 1), lists)
    own = play(two, Costs(unit, lambda a, b: 4.0))
    shared = play(two, Costs(unit, lambda a, b: 4.0, lambda a, b: "slow link"))
    assert own.step_s == 1 + 4 + 3 + 4 + 2
    # The second waits 4 for the first on the way there, and 1 on the way back.
    assert shared.step_s == own.step_s + 4 + 1
    sends = [(s.start_s, s.end_s) for s in shared.spans if s.stream == "send"]
    assert all(b >= a for (_, a), (b, _) in pairwise(sends))


def test_a_skip_waits_for_its_own_send_both_ways() -> None:
    made = schedule("gpipe", 3, 1)
    plain = Costs(unit, lambda a, b: 10.0 if abs(a - b) > 1 else 0.0)
    skip = Costs(unit, plain.send_s, skips=((0, 2),))
    assert play(made, plain).step_s == 9
    # Forward 1 + 10 + 1, then backward 2 of stage 2, and 10 back to stage 0.
    assert play(made, skip).step_s == 12 + 2 + 10 + 2


def test_gradients_are_reduced_beside_what_still_computes() -> None:
    made = schedule("gpipe", 2, 2)
    plain = play(made, Costs(unit)).step_s
    late = play(made, Costs(unit, reduce_s=lambda stage: 5.0 if stage == 0 else 1.0))
    assert late.step_s == plain + 5
    hidden = play(made, Costs(unit, reduce_s=lambda stage: 1.0 if stage == 1 else 0.0))
    assert hidden.step_s == plain
    data = [s for s in hidden.spans if s.stream == "data"]
    assert [(s.rank, s.end_s - s.start_s) for s in data] == [(1, 1.0)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_over_time_peaks_at_what_is_held(name: str) -> None:
    pp, m = legal(name, 4, 3)
    made = schedule(name, pp, m)
    timeline = play(made, Costs(unit))
    curves = memory(timeline, lambda stage: 2.0, lambda stage: 0.0)
    assert [max(v for _, v in curve) for curve in curves] == [2.0 * h for h in held(made)]
    assert all(curve[-1][1] == 0 for curve in curves)


def test_an_input_gradient_frees_its_part_early() -> None:
    timeline = play(schedule("zb-h1", 1, 1), Costs(unit))
    (curve,) = memory(timeline, lambda stage: 3.0, lambda stage: 1.0)
    assert curve == [(0.0, 0.0), (0.0, 3.0), (2.0, 2.0), (3.0, 0.0)]
