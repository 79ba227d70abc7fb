"""Every searcher on the same problems; each answer is checked by the exact evaluator."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.nouns.problem import NO_LIMIT, Ints, NoFeasibleAnswer, Problem, ProblemError
from autopar.nouns.solution import Solution
from autopar.searchers import SEARCHERS, Budget, Progress, integer_program, search
from autopar.searchers.annealing import Annealer
from autopar.searchers.model import from_problem
from autopar.searchers.run import NO_BUDGET, Run
from autopar.searchers.shrink import Contradiction, shrink
from tests.searchers.problems import layered, tiny_problems

EXACT = [name for name, s in SEARCHERS.items() if s.exact and name != "brute_force"]
OTHERS = [name for name, s in SEARCHERS.items() if not s.exact]
RELAXED = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def solve(
    problem: Problem, name: str, budget: Budget = NO_BUDGET, seed: int = 0
) -> Solution | None:
    try:
        return search(problem, name, budget, seed)
    except NoFeasibleAnswer:
        return None


def check(problem: Problem, solution: Solution) -> None:
    assert problem.feasible(solution.choice)
    assert solution.cost == problem.total(solution.choice)
    assert solution.peak == problem.peak(solution.choice) <= problem.usage_limit
    assert solution.lower_bound <= solution.cost


@settings(RELAXED, max_examples=500)
@given(tiny_problems())
def test_elimination_equals_brute_force(problem: Problem) -> None:
    _same_as_brute_force(problem, "elimination")


@pytest.mark.parametrize("name", sorted(set(EXACT) - {"elimination"}))
def test_exact_searchers_equal_brute_force(name: str) -> None:
    @settings(RELAXED, max_examples=150)
    @given(tiny_problems())
    def run(problem: Problem) -> None:
        _same_as_brute_force(problem, name)

    run()


def _same_as_brute_force(problem: Problem, name: str) -> None:
    reference = solve(problem, "brute_force")
    solution = solve(problem, name)
    assert (solution is None) == (reference is None)
    if solution is not None and reference is not None:
        check(problem, solution)
        assert solution.cost == reference.cost
        assert solution.optimal


@settings(RELAXED, max_examples=150)
@given(tiny_problems())
def test_memory_is_exact_where_doubles_are_not(problem: Problem) -> None:
    """Usages near 2**58, and a limit that the best choice passes by one."""
    best = solve(replace(problem, usage_limit=NO_LIMIT), "brute_force")
    if best is None:
        return
    large = replace(problem, usage=problem.usage + 2**58, usage_limit=NO_LIMIT)
    limit = max(large.peak(best.choice) - 1, 0)
    _same_as_brute_force(replace(large, usage_limit=limit), "elimination")


@pytest.mark.parametrize("name", OTHERS)
def test_heuristics_never_beat_brute_force(name: str) -> None:
    @settings(RELAXED, max_examples=12)
    @given(tiny_problems(), st.integers(0, 3))
    def run(problem: Problem, seed: int) -> None:
        reference = solve(problem, "brute_force")
        solution = solve(problem, name, Budget(evaluations=3000), seed)
        if solution is None:
            return
        assert reference is not None
        check(problem, solution)
        assert solution.lower_bound <= reference.cost <= solution.cost

    run()


@settings(RELAXED, max_examples=300)
@given(tiny_problems(), st.randoms(use_true_random=False))
def test_shrinking_keeps_costs_and_memory(problem: Problem, random: object) -> None:
    """Any choice of the small model lifts to one of equal cost that fits exactly if it does."""
    try:
        small, lift = shrink(problem)
    except Contradiction:
        assert solve(problem, "brute_force") is None
        return
    generator = np.random.default_rng(len(problem.cost))
    for _ in range(5):
        x = generator.integers(0, np.maximum(small.sizes, 1))
        lifted = lift(x)
        cost = small.cost(x)
        if np.isfinite(cost):
            assert problem.total(lifted) == cost
            assert small.fits(x) == (problem.peak(lifted) <= problem.usage_limit)
        else:
            assert not problem.allowed(lifted)


@pytest.mark.parametrize("limit", [None, 0.6, 0.35])
@pytest.mark.some(1)
def test_searchers_on_layers(limit: float | None) -> None:
    problem = layered(40, 5, seed=1, limit=limit)
    answers = {}
    for name in [*EXACT, *OTHERS]:
        budget = Budget(evaluations=5_000 if name in ("mcts", "elimination") else 100_000)
        if name in ("integer_program", "portfolio"):
            budget = Budget()
        answers[name] = search(problem, name, budget, 0)
        check(problem, answers[name])
    optimum = answers["integer_program"]
    assert optimum.gap < 1e-8
    assert answers["portfolio"].cost == optimum.cost
    for name, solution in answers.items():
        assert solution.cost >= optimum.cost, name
        assert solution.lower_bound <= optimum.cost, name
        assert solution.cost <= 1.35 * optimum.cost, name


@pytest.mark.parametrize("name", EXACT)
def test_costs_far_below_zero_prove_nothing_wrong(name: str) -> None:
    """The same amount off every strategy changes nothing but the total."""
    problem = layered(40, 5, seed=1, limit=0.35)
    optimum = search(problem, "integer_program").cost
    off = 10**12
    solution = search(replace(problem, cost=problem.cost - off), name, Budget(evaluations=4000))
    assert solution.lower_bound <= optimum - 40 * off <= solution.cost


@pytest.mark.parametrize("name", ["elimination", *OTHERS])
def test_same_seed_same_answer(name: str) -> None:
    problem = layered(30, 5, seed=2, limit=0.4)
    budget = Budget(evaluations=5_000)
    first, second = (search(problem, name, budget, seed=3) for _ in range(2))
    assert first.to_json() == second.to_json()


@pytest.fixture
def inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portfolio goes past its exact searchers, as it does on large problems."""
    monkeypatch.setattr("autopar.searchers.portfolio.SMALL", 0)
    monkeypatch.setattr("autopar.searchers.portfolio.NARROW", 0)
    monkeypatch.setattr("autopar.searchers.portfolio.CORE", 300)


@pytest.mark.parametrize(("name", "evaluations"), [("annealing", 300_000), ("portfolio", 60_000)])
@pytest.mark.usefixtures("inexact")
def test_same_answer_on_one_core_and_on_four(
    name: str, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.searchers.merging.CORE", 500)  # small integer programs
    problem = layered(300, 16, seed=6, limit=0.3)
    budget = Budget(evaluations=evaluations)
    rounds = 0
    play = Annealer.round

    def counted(annealer: Annealer, *arguments: float) -> list[Ints]:
        nonlocal rounds
        rounds += 1
        return play(annealer, *arguments)

    monkeypatch.setattr(Annealer, "round", counted)
    four = search(problem, name, budget, seed=1)
    assert rounds == 5
    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(
        "autopar.searchers.annealing.ThreadPoolExecutor", lambda workers: ThreadPoolExecutor(1)
    )
    os.sched_setaffinity(0, {min(cores)})
    try:
        one = search(problem, name, budget, seed=1)
    finally:
        os.sched_setaffinity(0, cores)
    assert one.to_json() == four.to_json()


@pytest.mark.parametrize("name", [*EXACT, *OTHERS])
def test_the_smallest_budget_still_gives_an_answer(name: str) -> None:
    problem = layered(60, 8, seed=7, limit=0.2)
    check(problem, search(problem, name, Budget(evaluations=1)))


def test_an_impossible_limit_says_what_would_do() -> None:
    nodes = [([1, 2], [8, 5], (0, 2)), ([1], [4], (1, 3))]
    with pytest.raises(NoFeasibleAnswer, match="least limit that would do is 9") as caught:
        search(Problem.build(nodes, [], 7), "portfolio")
    assert caught.value.least_limit == 9
    assert caught.value.proven_limit == 9
    assert "too low by 2:" in str(caught.value)
    assert search(Problem.build(nodes, [], 9)).cost == 3


@pytest.mark.parametrize("name", SEARCHERS)
def test_without_a_limit_no_use_is_too_much(name: str) -> None:
    problem = Problem.build([([1, 0], [2**62, 2**62 + 1], (0, 1))] * 3, [], None)
    assert search(problem, name, Budget(evaluations=1000)).cost == 0


def test_everything_forbidden_is_said() -> None:
    nodes = [([1, 2], [0, 0], (0, 2)), ([1], [0], (0, 2))]
    edges = [(0, 1, [[10**18], [10**18]])]
    for name in EXACT:
        with pytest.raises(NoFeasibleAnswer, match="forbidden"):
            search(Problem.build(nodes, edges), name)


def test_the_wall_clock_stops_the_search_and_says_so() -> None:
    problem = layered(400, 12, seed=4, limit=0.35)
    solution = search(problem, "elimination", Budget(wall_s=0.5))
    check(problem, solution)
    assert solution.optimal or solution.budget_spent


def test_interrupting_returns_the_best_so_far() -> None:
    problem = layered(60, 8, seed=5, limit=0.35)

    def interrupt(progress: Progress) -> None:
        if progress.cost is not None:
            raise KeyboardInterrupt

    solution = search(problem, "elimination", progress=interrupt)
    assert solution.interrupted
    check(problem, solution)
    assert threading.active_count() >= 1


@pytest.mark.parametrize("seed", [2, 7, 10])
@pytest.mark.usefixtures("inexact")
def test_a_gap_that_is_allowed_does_not_loosen_the_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.searchers.portfolio.PASSES", 60)
    monkeypatch.setattr("autopar.searchers.portfolio.CORE", 100_000)
    for limit in (0.1, 0.3):
        problem = layered(30, 5, seed, limit)
        optimum = search(problem, "integer_program").cost
        for gap in (0.005, 0.02):
            solution = search(problem, "portfolio", Budget(evaluations=60_000, gap=gap))
            assert solution.lower_bound <= optimum <= solution.cost


@pytest.mark.usefixtures("inexact")
def test_the_dual_leaves_evaluations_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    play = Annealer.round

    def counted(annealer: Annealer, *arguments: float) -> list[Ints]:
        left.append(annealer.run.remaining_evaluations)
        return play(annealer, *arguments)

    monkeypatch.setattr(Annealer, "round", counted)
    problem = layered(300, 16, seed=6, limit=0.3)
    budget = Budget(evaluations=60 * problem.num_nodes)
    solution = search(problem, "portfolio", budget)
    check(problem, solution)
    assert left
    assert left[0] > 0.3 * 60 * problem.num_nodes
    assert solution.to_json() == search(problem, "portfolio", budget).to_json()


@pytest.mark.usefixtures("inexact")
def test_an_interrupt_while_merging_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    solve_program = integer_program.solve
    pressed = 0

    def press(run: Run, *arguments: Any, **settings: Any) -> bool:
        nonlocal pressed
        ended = solve_program(run, *arguments, **settings)
        if run.searcher == "merging" and run.choice is not None:
            pressed += 1
            raise KeyboardInterrupt
        return ended

    monkeypatch.setattr("autopar.searchers.integer_program.solve", press)
    problem = layered(300, 16, seed=6, limit=0.3)
    solution = search(problem, "portfolio", Budget(evaluations=10**6))
    check(problem, solution)
    assert pressed == 1
    assert solution.interrupted


@pytest.mark.parametrize("name", OTHERS)
def test_a_proven_answer_ends_the_search(name: str) -> None:
    """Every node's cheapest strategy fits, and the edges have a free pair for all of them."""
    pair = [[0, 3, 3], [3, 0, 3], [3, 3, 0]]
    edges = [(a, b, pair) for a, b in [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)]]
    labels = [[[f"tp:{i}{k}"] for k in range(3)] for i in range(4)]
    nodes = [([0, 1, 2], [3, 2, 1], (0, 2))] * 4
    for given_labels in (None, labels):
        problem = Problem.build(nodes, edges, 12, labels=given_labels)
        solution = search(problem, name, Budget(evaluations=10**6))
        assert solution.cost == 0
        assert solution.optimal
        assert not solution.budget_spent
        assert solution.evaluations < 10**5


def test_elimination_says_that_its_branches_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.searchers.branch_and_bound.MAX_BRANCHES", 2)
    solution = search(layered(40, 5, seed=1, limit=0.35), "elimination")
    assert not solution.optimal
    assert solution.budget_spent


def test_an_unknown_searcher_is_named() -> None:
    with pytest.raises(ProblemError, match="elimination"):
        search(layered(3, 2, seed=0), "oracle")


def test_models_of_empty_problems() -> None:
    empty = Problem.build([], [])
    assert from_problem(empty).num_vars == 0
    for name in ("elimination", "portfolio", "brute_force"):
        assert search(empty, name).cost == 0
