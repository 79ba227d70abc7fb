"""What no choice can avoid changes no search: it is taken off before, and added again after."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.nouns.problem import FORBIDDEN, NoFeasibleAnswer, Problem
from autopar.searchers import SEARCHERS, Budget, Progress, search
from autopar.searchers.run import without_offset
from tests.searchers.problems import layered, tiny_problems

RELAXED = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def moved(problem: Problem, by: np.ndarray) -> Problem:
    """The problem with something added to all costs of each node."""
    shift = np.repeat(by, problem.num_strategies)
    cost = np.where(problem.cost >= FORBIDDEN, problem.cost, problem.cost + shift)
    return replace(problem, cost=cost)


@settings(RELAXED, max_examples=300)
@given(tiny_problems(), st.lists(st.integers(-(10**15), 10**15), min_size=6, max_size=6))
def test_taking_off_is_exact_and_has_a_way_back(problem: Problem, by: list[int]) -> None:
    shifted = moved(problem, np.array(by)[: problem.num_nodes])
    bare, offset = without_offset(shifted)
    again, _ = without_offset(problem)
    random = np.random.default_rng(len(problem.cost))
    for _ in range(5):
        x = random.integers(0, problem.num_strategies)
        assert bare.allowed(x) == problem.allowed(x)
        if bare.allowed(x):
            assert bare.total(x) + offset == shifted.total(x)
            assert bare.total(x) == again.total(x)
    assert without_offset(bare)[1] == 0


def test_no_allowed_cost_becomes_a_forbidden_one() -> None:
    top = FORBIDDEN - 1
    costs = [[-top, top, FORBIDDEN], [FORBIDDEN, FORBIDDEN, FORBIDDEN]]
    problem = Problem.build([(c, [0, 0, 0], (0, 0)) for c in costs], [])
    bare, offset = without_offset(problem)
    assert bare.cost.tolist() == [-top, top, *[FORBIDDEN] * 4]
    assert offset == 0


@pytest.mark.parametrize("name", SEARCHERS)
def test_a_constant_on_a_node_changes_no_answer(name: str) -> None:
    @settings(RELAXED, max_examples=10)
    @given(tiny_problems(), st.integers(0, 5), st.integers(-(10**12), 10**12))
    def run(problem: Problem, node: int, constant: int) -> None:
        by = np.zeros(problem.num_nodes, np.int64)
        by[min(node, problem.num_nodes - 1)] = constant
        _same_answer(problem, by, name, 2000)

    run()


@pytest.mark.parametrize("name", sorted(set(SEARCHERS) - {"brute_force"}))
@pytest.mark.parametrize("constant", [10**12, -(10**12)])
@pytest.mark.some(6)
def test_a_constant_on_every_node_changes_no_answer(name: str, constant: int) -> None:
    problem = layered(40, 8, seed=3, limit=0.3)
    _same_answer(problem, np.full(40, constant), name, 2_000)


@pytest.fixture
def inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portfolio goes past its exact searchers, as it does on large problems."""
    monkeypatch.setattr("autopar.searchers.portfolio.SMALL", 0)
    monkeypatch.setattr("autopar.searchers.portfolio.NARROW", 0)
    monkeypatch.setattr("autopar.searchers.portfolio.CORE", 300)


@pytest.mark.usefixtures("inexact")
def test_the_portfolio_of_large_problems_does_not_see_constants() -> None:
    problem = layered(200, 8, seed=3, limit=0.3)
    _same_answer(problem, np.full(200, 10**12), "portfolio", 300_000)


def _same_answer(problem: Problem, by: np.ndarray, name: str, evaluations: int) -> None:
    budget = Budget(evaluations=evaluations)
    lines: list[Progress] = []
    shifted = moved(problem, by)
    try:
        wanted = search(problem, name, budget)
    except NoFeasibleAnswer as error:
        with pytest.raises(NoFeasibleAnswer, match=f"^{re.escape(str(error))}$"):
            search(shifted, name, budget)
        return
    solution = search(shifted, name, budget, progress=lines.append)
    assert solution.choice.tolist() == wanted.choice.tolist()
    assert solution.cost == shifted.total(solution.choice) == wanted.cost + sum(by.tolist())
    assert solution.lower_bound == wanted.lower_bound + sum(by.tolist())
    assert solution.evaluations == wanted.evaluations
    assert lines[-1].cost == solution.cost or lines[-1].cost is None


def test_the_gap_is_that_of_the_costs_as_they_were_given() -> None:
    problem = layered(60, 8, seed=7, limit=0.2)
    bare = search(problem, "annealing", Budget(evaluations=3000))
    shifted = moved(problem, np.full(60, 10**6))
    solution = search(shifted, "annealing", Budget(evaluations=3000))
    assert bare.gap > 0
    assert solution.gap == pytest.approx((bare.cost - bare.lower_bound) / solution.cost)
    asked = Budget(evaluations=10**6, gap=0.01)
    assert 0 < search(shifted, "annealing", asked).gap <= 0.01


def test_the_bound_is_rounded_down_beyond_the_range_of_doubles() -> None:
    problem = layered(60, 8, seed=7, limit=0.2)
    shifted = moved(problem, np.full(60, 10**17 + 1))
    solution = search(shifted, "annealing", Budget(evaluations=1000))
    assert solution.cost == shifted.total(solution.choice)
    assert int(solution.lower_bound) < solution.cost
