"""Slices of sequences in schedules: their order is proven, what ranks hold is the papers'."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline.actions import Action, ScheduleError, to_text
from autopar.pipeline.check import Deadlock, check, held
from autopar.pipeline.clock import COSTS, Clock
from autopar.pipeline.play import Costs, play
from autopar.pipeline.schedules.table import SCHEDULES, schedule
from autopar.pipeline.written import written

SLICED = tuple(name for name, kind in SCHEDULES.items() if kind.sliced is not None)


def test_backward_comes_from_the_last_slice_to_the_first() -> None:
    made = schedule("1f1b", 2, 4, slices=2)
    assert to_text(made.lists) == (
        "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2\n1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2"
    )


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SLICED), st.integers(1, 6), st.integers(1, 4), st.integers(2, 5))
def test_every_one_is_a_schedule_and_holds_what_it_says(
    name: str, pp: int, groups: int, slices: int
) -> None:
    m = groups * slices
    made = schedule(name, pp, m, slices=slices)
    check(made)
    # Sun et al. 2024, Seq1F1B: as many more as a sequence has slices behind its first.
    more = slices - 1
    each = {
        "gpipe": [m] * pp,
        "1f1b": [pp - r + more for r in range(pp)],
        "eager-1f1b": [2 * (pp - r) - 1 + more for r in range(pp)],
        "zb-h1": [pp + more] * pp,
        "zb-h2": [2 * pp - 1 + more] * pp,
    }
    assert held(made) == tuple(min(m, most) for most in each[name])


@pytest.mark.parametrize("name", SLICED)
def test_slices_fill_what_few_microbatches_leave_empty(name: str) -> None:
    """In F = 1, B = 2 of a whole sequence the fill is that of a slice, an n-th."""
    p, m, n = 4, 2, 4
    unit = {"F": 1 / n, "B": 2 / n, "I": 1 / n, "W": 1 / n}
    timeline = play(schedule(name, p, m * n, slices=n), Costs(lambda a: unit[a.kind]))
    fill = {"zb-h1": p - 1, "zb-h2": 0}.get(name, 3 * (p - 1))  # Qi et al. 2023, table 2
    if name != "zb-h2":
        assert timeline.step_s == pytest.approx(3 * m + fill / n)


@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - set(SLICED)))
def test_others_are_refused_with_those_that_can(name: str) -> None:
    with pytest.raises(ScheduleError, match="take one of gpipe, 1f1b, eager-1f1b, zb-h1, zb-h2"):
        schedule(name, 2, 8, slices=2)


def test_lists_in_another_order_are_no_schedule_of_slices() -> None:
    lists = schedule("1f1b", 2, 4).lists
    with pytest.raises(Deadlock, match="waits for"):
        written("by hand", lists, 2)
    right = schedule("1f1b", 2, 4, slices=2).lists
    assert written("by hand", right, 2).slices == 2
    turned = tuple(tuple(Action(a.stage, a.kind, a.microbatch ^ 1) for a in own) for own in right)
    with pytest.raises(Deadlock):
        written("by hand", turned, 2)


@pytest.mark.parametrize("name", SLICED)
def test_the_clock_is_the_timeline_where_slices_differ(name: str) -> None:
    pp, slices, m = 3, 4, 8
    made = schedule(name, pp, m, slices=slices)
    draw = np.random.default_rng(3)
    each = draw.uniform(1, 2, (pp, slices, 2))  # forward and backward by stage and slice
    table = np.zeros((pp, slices * COSTS, 1))
    for stage, i in product(range(pp), range(slices)):
        ahead, back = each[stage, i]
        table[stage, i * COSTS : (i + 1) * COSTS, 0] = ahead, back, back, ahead, ahead
    sends = np.full((pp - 1, 1), 0.1)

    def took(action: Action) -> float:
        return float(each[action.stage, action.microbatch % slices, int(action.kind in "BI")])

    timeline = play(made, Costs(took, lambda source, target: 0.1))
    times = Clock(made).times(table, sends, np.zeros((pp, 1)))
    assert times.step_s[0] == pytest.approx(timeline.step_s, rel=1e-12)
    assert times.busy_s[:, 0] == pytest.approx(timeline.busy_s, rel=1e-12)
    saved = draw.uniform(1, 2, pp)
    peaks = Clock(made).peaks(saved[:, None])[:, 0]
    assert peaks == pytest.approx(held(made, lambda stage: float(saved[stage])), rel=1e-12)


def test_whole_sequences_stay_as_they_are() -> None:
    made = schedule("1f1b", 3, 6)
    assert replace(made, slices=1) == made
    check(made)
