"""A step of many microbatches from two of few is that of all of them."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.pipeline.clock import Clock
from autopar.pipeline.schedules.steady import SteadyClock
from autopar.pipeline.schedules.table import SCHEDULES, schedule

PP = 4


def costs(stages: int, pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stages up to 30 % apart, a last one with a head, sends a twentieth of them."""
    random = np.random.default_rng(stages)
    forward, inputs, weights = 1.0 + 0.3 * random.random((3, stages, 6))
    forward[-1] += 0.5
    actions = np.stack([forward, inputs + weights, inputs, weights, forward], axis=1)
    return actions, 0.05 * random.random((pairs, 6)), 0.1 * random.random((stages, 6))


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"chimera"}))
def test_many_microbatches_from_few(name: str) -> None:
    interleave = 2 if SCHEDULES[name].interleaves else 1
    steady = SteadyClock(name, PP, 24 * PP, interleave)
    whole = Clock(schedule(name, PP, 24 * PP, interleave))
    sizes = costs(len(whole.ranks), len(whole.pairs))
    ours, exact = steady.times(*sizes), whole.times(*sizes)
    assert ours.step_s == pytest.approx(exact.step_s, rel=1.5e-2)
    assert ours.busy_s == pytest.approx(exact.busy_s, rel=1e-12)
    assert ours.active_s.max(axis=0) == pytest.approx(exact.active_s.max(axis=0), rel=1.5e-2)
    assert len(steady.schedule.lists[0]) < len(whole.schedule.lists[0]) / 2


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_few_microbatches_are_played(name: str) -> None:
    steady = SteadyClock(name, PP, 2 * PP)
    whole = Clock(schedule(name, PP, 2 * PP))
    sizes = costs(len(whole.ranks), len(whole.pairs))
    assert (steady.times(*sizes).step_s == whole.times(*sizes).step_s).all()


def test_between_two_turns() -> None:
    sizes = None
    times = []
    for microbatches in (8, 10, 12):
        clock = SteadyClock("interleaved-1f1b", PP, microbatches, 2)
        sizes = sizes or costs(2 * PP, len(clock.pairs))
        times.append(clock.times(*sizes).step_s)
    assert (times[0] < times[1]).all()
    assert (times[1] < times[2]).all()


def test_active_is_from_the_first_action_to_the_last() -> None:
    clock = Clock(schedule("gpipe", 2, 1))
    ones = np.ones((2, 5, 1))
    times = clock.times(ones, np.zeros((1, 1)), np.zeros((2, 1)))
    assert times.step_s[0] == 4.0
    assert times.active_s[:, 0].tolist() == [4.0, 2.0]
