"""The price of an alternative is the best plan that has it, found here by trying every plan."""

from __future__ import annotations

import itertools

import numpy as np

from autopar.nouns.problem import FORBIDDEN, Problem
from autopar.report.alternatives import alternatives
from autopar.searchers import search


def _problem() -> Problem:
    draw = np.random.default_rng(7)
    nodes = [(draw.integers(0, 20, 3).tolist(), [0, 0, 0], (0, 1)) for _ in range(4)]
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3)]
    edges = [(a, b, draw.integers(0, 20, (3, 3))) for a, b in pairs]
    edges[0][2][:, 2] = FORBIDDEN  # so node 1 can never take its last strategy
    return Problem.build(nodes, edges, None)


def test_an_alternative_costs_what_the_best_plan_with_it_costs() -> None:
    problem = _problem()
    best = search(problem, searcher="elimination")
    names = ("first", "second", "third")
    by_node = alternatives(problem, best.choice.tolist(), [(n, names) for n in range(4)])
    totals = {x: problem.total(x) for x in itertools.product(range(3), repeat=4)}
    assert min(totals.values()) == best.cost
    for node in range(4):
        least = {
            names[s]: (min(t for x, t in totals.items() if x[node] == s) - best.cost) / 1e12
            for s in range(3)
            if s != best.choice[node]
        }
        wanted = sorted(extra for extra in least.values() if extra < FORBIDDEN / 2e12)
        assert {a.strategy: a.extra_s for a in by_node[node]}.items() <= least.items()
        assert [a.extra_s for a in by_node[node]] == wanted
    assert all(a.strategy != "third" for a in by_node[1])
