"""The rewritings that shrinking is made of: equal to their definition, and small in memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autopar.nouns.problem import FORBIDDEN, Problem
from autopar.searchers.arcs import arcs
from autopar.searchers.gather import by_columns, gather, keep_labels
from autopar.searchers.model import chunks, from_problem
from autopar.searchers.shrink import drop_hopeless, merge_forced
from tests.searchers.problems import tiny_problems

RELAXED = settings(
    deadline=None,
    derandomize=True,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow],
)


@RELAXED
@given(tiny_problems())
def test_keeping_labels_is_a_gather(problem: Problem) -> None:
    m = from_problem(problem)
    keep = np.random.default_rng(len(problem.cost)).random(m.start[-1]) < 0.7
    keep[m.start[:-1]] = True
    owner = np.repeat(np.arange(m.num_vars), m.sizes)[keep]
    source = np.flatnonzero(keep) - m.start[owner]
    wanted, wanted_lift = gather(m, np.arange(m.num_vars), source, np.bincount(owner))
    model, lift = keep_labels(m, keep)
    for name in ("start", "unary", "edge", "edge_start", "edge_cost", "term_start", "term_usage"):
        assert np.array_equal(getattr(model, name), getattr(wanted, name)), name
    last = model.sizes - 1
    assert np.array_equal(lift(last), wanted_lift(last))


@RELAXED
@given(tiny_problems())
def test_cells_by_columns(problem: Problem) -> None:
    m = from_problem(problem)
    for part in chunks(m.edge_start, 9):
        wanted = [m.matrix(e).T.ravel() for e in range(part.start, part.stop)]
        assert np.array_equal(by_columns(m, part), np.concatenate(wanted))


def test_chunks_cover_all_edges_once() -> None:
    start = np.array([0, 3, 4, 9, 40, 41])
    assert list(chunks(start, 5)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert list(chunks(np.array([0]), 5)) == []


@pytest.mark.parametrize("step", [drop_hopeless, merge_forced, arcs])
def test_steps_take_little_more_memory_than_the_cells(step: object) -> None:
    """One label of thousands goes, one pair of many is forced."""
    random = np.random.default_rng(0)
    nodes, labels = 40, 250
    forced = np.full((labels, labels), FORBIDDEN)
    np.fill_diagonal(forced, 0)
    hopeless = random.integers(0, 9, (labels, labels))
    hopeless[3] = FORBIDDEN
    matrices = [random.integers(0, 9, (labels, labels)) for _ in range(nodes - 3)]
    edges = [(i, i + 1, matrix) for i, matrix in enumerate([forced, hopeless, *matrices])]
    costs = np.zeros(labels, np.int64)
    m = from_problem(Problem.build([(costs, costs, (0, 0))] * nodes, edges))
    tracemalloc.start()
    try:
        assert callable(step)
        assert step(m) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * m.edge_cost.nbytes + 2e7
