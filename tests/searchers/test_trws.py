"""The dual: its bound never passes the optimum, and it rules out no label of an optimal answer."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings

from autopar.nouns.problem import NoFeasibleAnswer, Problem
from autopar.searchers import Budget, search
from autopar.searchers.model import from_problem
from autopar.searchers.run import Run
from autopar.searchers.trws import Dual, nearest
from tests.searchers.problems import layered, tiny_problems


@settings(
    deadline=None,
    derandomize=True,
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(tiny_problems())
def test_bound_and_ruling_out(problem: Problem) -> None:
    try:
        optimum = search(problem, "brute_force")
    except NoFeasibleAnswer:
        return
    run = Run(problem, Budget(), "test")
    model = from_problem(run.problem)
    dual = Dual(model, run, lambda x: x)
    dual.ascend(60)
    least = optimum.cost - run.offset
    assert dual.bound <= least + 1e-6 * max(abs(least), 1)
    keep = dual.open_labels(float(least))
    assert keep[model.start[:-1] + optimum.choice].all()
    if dual.choice is not None:
        assert problem.feasible(dual.choice)


def test_bound_is_near_on_layers() -> None:
    problem = layered(60, 6, seed=3, limit=0.5)
    optimum = search(problem, "integer_program")
    run = Run(problem, Budget(), "test")
    dual = Dual(from_problem(run.problem), run, lambda x: x)
    dual.ascend(800)
    assert 0.97 * optimum.cost <= dual.bound + run.offset <= optimum.cost


def test_a_bound_of_zero_does_not_stop_the_prices() -> None:
    """Every node's cheapest strategy costs nothing, and memory rules that choice out."""
    nodes = [([0, 10, 30], [9, 4, 1], (0, 2))] * 6
    problem = Problem.build(nodes, [], 30)
    run = Run(problem, Budget(), "test")
    dual = Dual(from_problem(run.problem), run, lambda x: x)
    dual.ascend(400)
    assert 40 <= dual.bound <= search(problem, "brute_force").cost


def test_the_ascent_keeps_to_its_evaluations() -> None:
    problem = layered(60, 6, seed=3, limit=0.5)
    run = Run(problem, Budget(evaluations=4000), "test")
    dual = Dual(from_problem(run.problem), run, lambda x: x)
    dual.ascend(1500, evaluations=0.25 * run.remaining_evaluations)
    assert dual.passes == 8  # of 2 * 60 evaluations
    dual.ascend(1500, evaluations=100)
    assert run.evaluations == 960


def test_nearest() -> None:
    assert nearest(np.array([2, 5, 9]), np.array([0, 3, 4, 8, 20])).tolist() == [0, 0, 1, 2, 2]
    assert nearest(np.array([4]), np.array([1, 9])).tolist() == [0, 0]
