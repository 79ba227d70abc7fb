"""What else was close: the cost of forcing one op to another strategy, all others chosen anew.

The extra cost of strategy ``s`` at node ``i`` is min{objective(x) : x_i = s} - objective(plan),
found by solving the problem again with every other strategy of the node forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopar.nouns.problem import FORBIDDEN, NoFeasibleAnswer, Problem
from autopar.nouns.solution import Solution
from autopar.pricing.prices import PICOSECONDS
from autopar.report.explained import Alternative
from autopar.searchers import search

EXACT = "elimination"


def alternatives(
    problem: Problem,
    choice: Sequence[int],
    nodes: Iterable[tuple[int, Sequence[str]]],
    most: int = 3,
    objection: Callable[[Sequence[int]], str] = lambda _: "",
) -> dict[int, tuple[Alternative, ...]]:
    """For each (node, names of its strategies), the ``most`` closest others, cheapest first.

    ``choice`` is the plan's strategy at every node. The objective is in picoseconds. ``objection``
    says of a whole answer that costs less than the plan why it is not the plan.
    """
    base = problem.total(choice)
    by_node = {}
    for node, names in nodes:
        others = [s for s in range(len(names)) if s != choice[node]]
        priced = [(s, _forced(problem, node, s)) for s in others]
        possible = [(answer.cost - base, s, answer) for s, answer in priced if answer is not None]
        possible.sort(key=lambda row: row[:2])
        if possible:
            by_node[node] = tuple(
                Alternative(
                    names[s],
                    extra / PICOSECONDS,
                    objection(answer.choice.tolist()) if extra < 0 else "",
                )
                for extra, s, answer in possible[:most]
            )
    return by_node


def _forced(problem: Problem, node: int, strategy: int) -> Solution | None:
    """The best answer with ``strategy`` at ``node``; None where nothing allows it."""
    first, end = problem.strategy_start[node : node + 2]
    cost = problem.cost.copy()
    cost[first:end] = np.where(np.arange(end - first) == strategy, cost[first:end], FORBIDDEN)
    try:
        solution = search(replace(problem, cost=cost), searcher=EXACT)
    except NoFeasibleAnswer:
        return None
    return None if solution.cost >= FORBIDDEN else solution
