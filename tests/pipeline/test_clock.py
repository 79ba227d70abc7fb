"""The clock against the timeline: equal, number by number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline.actions import KINDS, Action, from_text, one_route
from autopar.pipeline.check import Deadlock, held
from autopar.pipeline.clock import COSTS, Clock, first_forwards
from autopar.pipeline.play import Costs, play
from autopar.pipeline.schedules.table import SCHEDULES, schedule
from tests.pipeline.test_schedules import legal


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 4), st.data())
def test_it_takes_what_the_timeline_takes(
    name: str, pp: int, groups: int, data: st.DataObject
) -> None:
    pp, m = legal(name, pp, groups)
    made = schedule(name, pp, m, 2 if SCHEDULES[name].interleaves else 1)
    stages = len(made.ranks)
    route = made.routes[0]
    skips = []
    if len(made.routes) == 1 and len(route) > 3 and data.draw(st.booleans()):
        skips = [(route[0], route[-1]), (route[1], route[-1])]
    clock = Clock(made, skips)
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    columns = 3
    actions_s = random.uniform(0, 3, (stages, COSTS, columns))
    first = first_forwards(made)
    sends_s = random.uniform(0, 1, (len(clock.pairs), columns))
    reduce_s = random.uniform(0, 5, (stages, columns)) * random.integers(0, 2, (stages, 1))
    times = clock.times(actions_s, sends_s, reduce_s)
    for column in range(columns):

        def action_s(action: Action, column: int = column) -> float:
            cost = len(KINDS) if action in first else KINDS.index(action.kind)
            return float(actions_s[action.stage, cost, column])

        def send_s(a: int, b: int, column: int = column) -> float:
            return float(sends_s[clock.pairs.index((min(a, b), max(a, b))), column])

        def reduced_s(stage: int, column: int = column) -> float:
            return float(reduce_s[stage, column])

        timeline = play(made, Costs(action_s, send_s, reduce_s=reduced_s, skips=skips))
        assert times.step_s[column] == timeline.step_s
        assert times.busy_s[:, column] == pytest.approx(timeline.busy_s)
    saved = random.integers(1, 9, (stages, 1)).astype(float)
    assert clock.peaks(saved)[:, 0] == pytest.approx(held(made, lambda s: float(saved[s, 0])))
    pending = random.integers(1, 9, (stages, 1)).astype(float)
    most = held(made, lambda s: float(saved[s, 0]), lambda s: float(pending[s, 0]))
    assert clock.peaks(saved, pending)[:, 0] == pytest.approx(most)
    same = held(made, lambda s: float(saved[s, 0]), lambda s: float(saved[s, 0]))
    assert clock.peaks(saved)[:, 0] == pytest.approx(same)


def test_lists_that_wait_for_one_another_are_refused() -> None:
    lists = from_text("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1")
    with pytest.raises(Deadlock, match="waits for"):
        Clock(one_route("mine", (0, 1), lists, 2))
