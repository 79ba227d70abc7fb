"""What pipelines of the transformer family take and hold, against schedules that are played."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.pipeline_time import Costs, Pipeline, layers_of, pipelines_s
from autopar.pipeline.clock import Clock
from autopar.pipeline.schedules.table import schedule

LAYER = Costs(*(np.array([value]) for value in (1.0, 1.2, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0)))
HEADED = Costs(*(np.array([value]) for value in (1.0, 1.2, 0.8, 0.7, 0.8, 0.5, 0.0, 0.0)))


def step_s(pipeline: Pipeline, costs: Costs = LAYER) -> float:
    return float(pipelines_s([pipeline], costs)[0][0])


@given(st.integers(1, 200), st.integers(1, 64))
def test_layers_are_spread_evenly(layers: int, stages: int) -> None:
    counts = layers_of(layers, stages)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_the_ends_have_fewer() -> None:
    assert layers_of(126, 16) == (7, *[8] * 14, 7)
    assert layers_of(30, 32) == (0, *[1] * 30, 0)
    assert layers_of(31, 8) == (*[4] * 7, 3)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12), st.integers(6, 30)
)
def test_uneven_stages_are_as_played(name: str, pp: int, m: int, layers: int) -> None:
    """GPipe's closed formula, and 1F1B, of a chain whose stages differ by a layer at the ends."""
    counts = layers_of(layers, pp)
    clock = Clock(schedule(name, pp, m))
    actions = np.array([[[n], [2.0 * n], [1.2 * n], [0.8 * n], [1.0 * n]] for n in counts])
    played = clock.times(actions, np.zeros((len(clock.pairs), 1)), np.zeros((pp, 1)))
    assert step_s(Pipeline(name, pp, 1, m, layers)) == pytest.approx(played.step_s[0], rel=1e-9)


def test_schedules_stand_in_their_order() -> None:
    """Zero bubble before interleaved before 1F1B (Qi et al. 2023, table 4)."""
    times = [
        step_s(Pipeline(name, 8, interleave, 32, 32), HEADED)
        for name, interleave in (("zb-v", 1), ("interleaved-1f1b", 2), ("1f1b", 1))
    ]
    assert times == sorted(times)
    assert times[0] > 32 * 4 * 3.0


def test_steps_that_overlap_hide_the_fill() -> None:
    """Where F, I and W take the same time no rank waits between its first action and its last."""
    same = Costs(*(np.array([value]) for value in (1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
    plain = Pipeline("zb-h2", 8, 1, 64, 32)
    assert step_s(replace(plain, steps_overlap=True), same) == pytest.approx(64 * 4 * 3.0)
    assert step_s(plain, same) == pytest.approx(64 * 4 * 3.0 + 7 * 4)


def test_far_hops_cost_more() -> None:
    """Eight ranks of which four each are neighbours: one hop of seven is far."""
    sends = Costs(*(np.array([value]) for value in (1.0, 1.2, 0.8, 0.0, 0.0, 0.0, 0.5, 0.1)))
    near = step_s(Pipeline("1f1b", 8, 1, 16, 8, neighbours=8), sends)
    mixed = step_s(Pipeline("1f1b", 8, 1, 16, 8, neighbours=4), sends)
    far = step_s(Pipeline("1f1b", 8, 1, 16, 8, neighbours=1), sends)
    assert near < mixed < far


@pytest.mark.parametrize(
    ("pipeline", "held"),
    [
        (Pipeline("1f1b", 4, 1, 16, 16), (16, 12, 8, 4)),
        (Pipeline("1f1b", 4, 1, 2, 16), (8, 8, 8, 4)),
        (Pipeline("gpipe", 4, 1, 16, 16), (64, 64, 64, 64)),
        (Pipeline("zb-h2", 4, 1, 64, 16), (28, 28, 28, 28)),
        (Pipeline("zb-v", 4, 1, 64, 16), (16, 16, 16, 16)),
        (Pipeline("interleaved-1f1b", 4, 2, 16, 16), (22, 18, 14, 10)),
    ],
)
def test_layers_in_flight(pipeline: Pipeline, held: tuple[int, ...]) -> None:
    assert pipeline.held_layers() == held


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("1f1b", {0}, {3}), ("zb-v", {0}, {0}), ("hanayo", {0}, {0}), ("chimera", {0, 3}, {0, 3})],
)
def test_who_has_the_ends_of_the_model(name: str, first: set[int], last: set[int]) -> None:
    assert Pipeline(name, 4, 1, 8, 16).end_ranks() == (frozenset(first), frozenset(last))
