"""Free meshes of several axes: what is claimed is what the plan costs, and the best is the best."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from autopar.files.cluster_file import load_cluster
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.problem import FORBIDDEN
from autopar.searchers import search
from benchmarks.contest_format import dumps, loads
from benchmarks.free_problem import FreeProblem, free_problem
from tests.planner.graphs import Drawing, gpt

CLUSTER = load_cluster("examples/clusters/h100_8x8.yaml")
MESHES = [(8,), (4, 2), (8, 4), (2, 2, 2), (8, 4, 2)]


def free(graph: Graph, sizes: tuple[int, ...]) -> FreeProblem:
    return free_problem(graph, CLUSTER, Mesh(("a", "b", "c")[: len(sizes)], sizes), "float32")


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_claimed_objective_equals_the_plan_priced_again(sizes: tuple[int, ...]) -> None:
    made = free(gpt(layers=3, b=16, d=64, heads=8), sizes)
    solution = search(made.problem)
    assert made.priced_again(solution.choice.tolist()) == solution.cost


@functools.cache
def uneven(sizes: tuple[int, ...]) -> FreeProblem:
    """Sizes that some axes cut unevenly: a vocabulary of 65, 6 heads."""
    return free(gpt(layers=2, b=12, s=8, d=48, heads=6, ffn=96, vocab=65), sizes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2)], ids=str)
def test_any_answer_costs_what_its_plan_costs(sizes: tuple[int, ...], seed: int) -> None:
    """Answers of random taste."""
    made = uneven(sizes)
    problem = made.problem
    draw = np.random.default_rng(seed)
    taste = np.where(
        problem.cost >= FORBIDDEN, FORBIDDEN, draw.integers(0, 10**12, len(problem.cost))
    )
    choice = search(replace(problem, cost=taste)).choice
    assert problem.allowed(choice)
    assert made.priced_again(choice.tolist()) == problem.total(choice)


def mlp(b: int, d: int, ffn: int) -> Graph:
    """A linear layer, an activation, a linear layer and a sum: five nodes or so."""
    g = Drawing()
    x = g.given("x", b, d, dtype="float32")
    up = g.op("linear", "up/linear", x, g.parameter("up.weight", ffn, d), shape=(b, ffn))
    active = g.op("gelu", "gelu", up, shape=(b, ffn))
    down = g.op("linear", "down/linear", active, g.parameter("down.weight", d, ffn), shape=(b, d))
    return g.graph(g.op("sum", "sum", down, shape=(), dims=(0, 1), keepdim=False))


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(64, 256, 1024), (4096, 64, 64), (6, 10, 30)], ids=str)
def test_the_best_is_that_of_brute_force(
    sizes: tuple[int, ...], shape: tuple[int, int, int]
) -> None:
    made = free(mlp(*shape), sizes)
    # Brute force can follow where each op has a few strategies: keep the cheapest of each.
    problem = made.problem
    cost = problem.cost.copy()
    for first, end in zip(problem.strategy_start[:-1], problem.strategy_start[1:], strict=True):
        order = np.argsort(cost[first:end], kind="stable")
        cost[first:end][order[8:]] = FORBIDDEN
    small = replace(problem, cost=cost)
    expected = search(small, searcher="brute_force")
    for searcher in ("elimination", "portfolio"):
        solution = search(small, searcher=searcher)
        assert solution.cost == expected.cost
        assert solution.lower_bound <= expected.cost
    assert made.priced_again(expected.choice.tolist()) == expected.cost


def test_data_axes_are_not_free() -> None:
    with pytest.raises(ValueError, match="dp_shard"):
        free_problem(gpt(), CLUSTER, Mesh(("dp_shard", "tp"), (2, 2)), "float32")


def test_outside_solvers_see_the_same_problem() -> None:
    problem = free(gpt(layers=2, b=16, d=64, heads=8), (4, 2)).problem
    again = loads(dumps(problem))
    solution = search(again)
    assert solution.optimal
    assert problem.total(solution.choice) == solution.cost == search(problem).cost
