"""Shapes that the contest's files do not have: an answer is found wherever one was planted."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from autopar.nouns.problem import NoFeasibleAnswer
from autopar.searchers import Budget, search
from autopar.searchers.model import from_problem
from autopar.searchers.tree_decomposition import elimination_order
from benchmarks.shapes import SHAPES, make


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("searcher", ["portfolio", "coordinate_descent", "mcts"])
@pytest.mark.some(18)
def test_a_feasible_answer_is_found(name: str, searcher: str) -> None:
    problem = make(name, size=24 / SHAPES[name].nodes)
    solution = search(problem, searcher, Budget(evaluations=5_000))
    assert problem.feasible(solution.choice)
    assert solution.cost == problem.total(solution.choice)
    assert solution.lower_bound <= solution.cost


def test_the_widest_graph_gets_an_order_at_once() -> None:
    """Joining the neighbours of its core to the end would take a minute."""
    model = from_problem(make("wide", size=0.4))
    started = time.process_time()
    order = elimination_order(model)
    assert time.process_time() - started < 10
    assert sorted(order) == list(range(model.num_vars))


def test_an_impossible_limit_on_a_wide_graph_is_explained_at_once() -> None:
    """With pairs forbidden the frugal choice is a wide problem of its own."""
    possible = make("forbidden_wide")
    started = time.process_time()
    with pytest.raises(NoFeasibleAnswer) as caught:
        search(replace(possible, usage_limit=possible.usage_limit // 4))
    assert time.process_time() - started < 20
    assert caught.value.least_limit is not None
    assert caught.value.proven_limit is not None
    assert caught.value.proven_limit <= caught.value.least_limit < 2 * possible.usage_limit


def test_instances_are_the_same_for_the_same_seed() -> None:
    first, again, other = (make("hubs", seed, 0.005) for seed in (1, 1, 2))
    assert first.edge_cost.tolist() == again.edge_cost.tolist()
    assert first.cost.tolist() != other.cost.tolist()
