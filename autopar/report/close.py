"""What else was close: the cost of forcing one op to another strategy, all others chosen anew.

The extra cost of strategy ``s`` at node ``i`` is min{objective(x) : x_i = s} - min objective, found
by solving the problem again with every other strategy of the node forbidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopar.nouns.problem import FORBIDDEN, NoFeasibleAnswer, Problem, Solution
from autopar.report.explain import Alternative
from autopar.searchers import search


def alternatives(
    problem: Problem,
    best: Solution,
    nodes: Iterable[tuple[int, Sequence[str]]],
    searcher: str,
    unit_s: float,
    most: int = 3,
) -> dict[int, tuple[Alternative, ...]]:
    """For each (node, names of its strategies), the ``most`` closest others, cheapest first.

    unit_s: seconds that one unit of the problem's objective stands for.
    """
    found = {}
    for node, names in nodes:
        others = [s for s in range(len(names)) if s != int(best.choice[node])]
        priced = [(_forced(problem, node, s, searcher), s) for s in others]
        possible = sorted((cost - best.cost, s) for cost, s in priced if cost is not None)
        if possible:
            found[node] = tuple(
                Alternative(names[s], extra * unit_s) for extra, s in possible[:most]
            )
    return found


def _forced(problem: Problem, node: int, strategy: int, searcher: str) -> int | None:
    """The least objective with ``strategy`` at ``node``; None where nothing allows it."""
    first, end = problem.strategy_start[node : node + 2]
    cost = problem.cost.copy()
    cost[first:end] = np.where(np.arange(end - first) == strategy, cost[first:end], FORBIDDEN)
    try:
        found = search(replace(problem, cost=cost), searcher=searcher)
    except NoFeasibleAnswer:
        return None
    return None if found.cost >= FORBIDDEN else found.cost
