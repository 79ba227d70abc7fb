"""Experts placed by load, beside all assignments of the smallest cases."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.nouns.expert_placement import ExpertPlacement, busiest_over_mean, inverse
from autopar.rules.balanced_experts import by_load

SMALL = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)]


def least(loads: tuple[float, ...], ranks: int) -> float:
    """Of all assignments, the busiest rank's rows over the mean."""
    return min(busiest_over_mean(loads, order, ranks) for order in _assignments(len(loads), ranks))


def _assignments(experts: int, ranks: int) -> list[tuple[int, ...]]:
    """Each division into equal groups once."""

    def divide(rest: tuple[int, ...]) -> list[tuple[int, ...]]:
        if not rest:
            return [()]
        first, *others = rest
        made = []
        for group in itertools.combinations(others, experts // ranks - 1):
            left = tuple(e for e in others if e not in group)
            made += [(first, *group, *more) for more in divide(left)]
        return made

    return divide(tuple(range(experts)))


@pytest.mark.parametrize(("experts", "ranks"), SMALL)
def test_small_cases_are_within_a_twentieth_of_the_best_and_mostly_the_best(
    experts: int, ranks: int
) -> None:
    draw, exact, times = random.Random(experts * ranks), 0, 60
    for _ in range(times):
        loads = tuple(float(round(draw.expovariate(0.01))) for _ in range(experts))
        made, best = busiest_over_mean(loads, by_load(loads, ranks), ranks), least(loads, ranks)
        assert best - 1e-9 <= made <= 1.05 * best
        exact += made <= best * (1 + 1e-3)
    assert exact >= 0.8 * times


@given(st.lists(st.integers(0, 1000), min_size=12, max_size=12), st.sampled_from([2, 3, 4, 6]))
def test_it_is_a_permutation_and_never_worse_than_the_order(rows: list[int], ranks: int) -> None:
    loads = tuple(map(float, rows))
    order = by_load(loads, ranks)
    assert sorted(order) == list(range(12))
    natural = busiest_over_mean(loads, range(12), ranks)
    assert busiest_over_mean(loads, order, ranks) <= natural
    placed = ExpertPlacement.of(order, ranks)
    assert placed.experts == order
    assert ExpertPlacement.parse(str(placed)) == placed
    assert tuple(placed.places[e] for e in order) == tuple(range(12))
    assert inverse(inverse(order)) == order


def test_neighbours_that_are_busy_together_come_apart() -> None:
    loads = (400.0, 400.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0)
    assert busiest_over_mean(loads, range(8), 4) == pytest.approx(800 * 4 / 1400)
    assert busiest_over_mean(loads, by_load(loads, 4), 4) == pytest.approx(500 * 4 / 1400)


def test_where_nothing_is_gained_experts_stay_in_order() -> None:
    assert by_load((1.0,) * 8, 4) == tuple(range(8))
    assert by_load((0.0,) * 8, 4) == tuple(range(8))
    assert by_load((9.0, 1.0, 1.0, 1.0), 4) == tuple(range(4))
    assert by_load((9.0, 1.0, 1.0, 1.0), 1) == tuple(range(4))
    assert by_load((4.0, 1.0, 1.0, 4.0), 2) == tuple(range(4))


def test_many_experts_are_even_to_a_hundredth() -> None:
    draw = random.Random(0)
    loads = tuple(draw.expovariate(1.0) for _ in range(256))
    assert busiest_over_mean(loads, range(256), 32) > 1.5
    assert busiest_over_mean(loads, by_load(loads, 32), 32) < 1.01


@pytest.mark.parametrize("text", ["0 1 | 1 2", "0 1 2 | 3", "0 x", "", "1 2 | 3 4"])
def test_texts_that_are_no_placement_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="experts"):
        ExpertPlacement.parse(text)
