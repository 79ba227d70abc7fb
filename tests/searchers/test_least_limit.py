"""An infeasible limit is told the least that would do where it is known, else a bound on that."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autopar.nouns.problem import FORBIDDEN, NoFeasibleAnswer, Problem
from autopar.searchers import Budget, search
from benchmarks.shapes import SHAPES, make
from tests.searchers.problems import tiny_problems


def refused(problem: Problem, limit: int) -> NoFeasibleAnswer:
    with pytest.raises(NoFeasibleAnswer) as caught:
        search(replace(problem, usage_limit=limit), "portfolio", Budget(evaluations=2000))
    return caught.value


def test_the_least_sum_of_usages_is_not_the_least_peak() -> None:
    """Usages 9 and 0, one after the other, or 5 and 5."""
    nodes = [([0, 0], [9, 5], (0, 1)), ([0, 0], [0, 5], (1, 2))]
    problem = Problem.build(nodes, [(0, 1, [[0, FORBIDDEN], [FORBIDDEN, 0]])])
    error = refused(problem, 3)
    assert (error.least_limit, error.proven_limit) == (5, 5)
    assert "is too low by 2: no choice needs less than 5" in str(error)
    assert "the least limit that would do is 5" in str(error)


def test_it_is_what_brute_force_finds() -> None:
    asked = 0

    @settings(
        deadline=None,
        derandomize=True,
        max_examples=250,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(tiny_problems())
    def run(problem: Problem) -> None:
        nonlocal asked
        choices = itertools.product(*map(range, problem.num_strategies.tolist()))
        least = min((problem.peak(x) for x in choices if problem.allowed(x)), default=0)
        if not least:
            return
        asked += 1
        error = refused(problem, least - 1)
        assert (error.least_limit, error.proven_limit) == (least, least)
        assert search(replace(problem, usage_limit=least)).peak == least

    run()
    assert asked > 50


@pytest.mark.parametrize("name", ["forbidden", "chain", "terms", "islands"])
def test_an_integer_program_agrees(name: str) -> None:
    problem = make(name, size=40 / SHAPES[name].nodes)
    error = refused(problem, 0)
    assert error.least_limit is not None
    assert error.least_limit == error.proven_limit
    search(replace(problem, usage_limit=error.least_limit), "integer_program")
    with pytest.raises(NoFeasibleAnswer):
        search(replace(problem, usage_limit=error.least_limit - 1), "integer_program")


def test_where_it_is_not_known_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.searchers.least_limit.NARROW", 0)
    random = np.random.default_rng(0)
    nodes = [([0] * 3, random.integers(1, 99, 3), (0, 2)) for _ in range(6)]
    edges = [
        (a, b, np.where(random.random((3, 3)) < 0.3, FORBIDDEN, 0))
        for a, b in itertools.combinations(range(6), 2)
    ]
    error = refused(Problem.build(nodes, edges), 10)
    assert error.least_limit is not None
    assert error.proven_limit is not None
    assert error.proven_limit < error.least_limit
    assert f"the least limit that would do is at most {error.least_limit}" in str(error)
    assert "too low by at least" in str(error)
