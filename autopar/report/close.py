"""What else was close: the cost of forcing one op to another strategy, all others chosen anew.

The extra cost of strategy ``s`` at node ``i`` is min{objective(x) : x_i = s} - objective(plan),
found by solving the problem again with every other strategy of the node forbidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopar.nouns.problem import FORBIDDEN, NoFeasibleAnswer, Problem
from autopar.planner.prices import PICOSECONDS
from autopar.report.explain import Alternative
from autopar.searchers import search

EXACT = "elimination"


def alternatives(
    problem: Problem,
    choice: Sequence[int],
    nodes: Iterable[tuple[int, Sequence[str]]],
    most: int = 3,
) -> dict[int, tuple[Alternative, ...]]:
    """For each (node, names of its strategies), the ``most`` closest others, cheapest first.

    ``choice`` is the plan's strategy at every node. The objective is in picoseconds.
    """
    base = problem.total(choice)
    found = {}
    for node, names in nodes:
        others = [s for s in range(len(names)) if s != choice[node]]
        priced = [(_forced(problem, node, s), s) for s in others]
        possible = sorted((cost - base, s) for cost, s in priced if cost is not None)
        if possible:
            closest = possible[:most]
            found[node] = tuple(Alternative(names[s], extra / PICOSECONDS) for extra, s in closest)
    return found


def _forced(problem: Problem, node: int, strategy: int) -> int | None:
    """The least objective with ``strategy`` at ``node``; None where nothing allows it."""
    first, end = problem.strategy_start[node : node + 2]
    cost = problem.cost.copy()
    cost[first:end] = np.where(np.arange(end - first) == strategy, cost[first:end], FORBIDDEN)
    try:
        found = search(replace(problem, cost=cost), searcher=EXACT)
    except NoFeasibleAnswer:
        return None
    return None if found.cost >= FORBIDDEN else found.cost
