"""Why there is no answer: is the limit too low, by how much, and what limit would do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.nouns.problem import FORBIDDEN, NO_LIMIT, Ints, NoFeasibleAnswer, Problem
from autopar.searchers.branch_and_bound import branch_and_bound
from autopar.searchers.run import Budget, Run
from autopar.searchers.shrink import Contradiction, shrink
from autopar.searchers.starts import first_answer, shrunk
from autopar.searchers.tree_decomposition import Elimination, elimination_cells, table_share

CELLS = 1 << 22
"""Of all tables in looking for a limit that would do: an error must come within seconds."""
NARROW = 1 << 18
"""Table cells of one elimination up to which the least limit is looked for."""
EVALUATIONS = 20_000
"""Of all searches for the least limit together."""
SECONDS = 5.0
"""The same, on a machine on which the evaluations take longer."""


def explain(run: Run) -> NoFeasibleAnswer | None:
    """The error to raise for a run that ended without an answer.

    None when looking for a limit that would do met a choice that fits as it is; it is offered.
    """
    p = run.problem
    proven = _least_peak_bound(p)
    example = _frugal_choice(p, lambda: run.remaining_s <= 0)
    least = None if example is None else p.peak(example)
    if example is not None and least is not None and run.remaining_s > 0:
        example, proven = _least_peak(p, example, proven)
        least = p.peak(example)
    if example is not None and run.offer(example, "least memory"):
        return None
    parts = []
    if p.usage_limit < min(proven, NO_LIMIT):
        at_least = "" if least == proven else "at least "
        parts.append(f"the usage limit {p.usage_limit} is too low by {at_least}")
        parts[-1] += f"{proven - p.usage_limit}: no choice needs less than {proven}"
    elif run.lower_bound == np.inf and p.usage_limit == NO_LIMIT:
        parts.append("every choice is forbidden")
    elif run.lower_bound == np.inf:
        parts.append(f"no allowed choice keeps to the usage limit {p.usage_limit}")
    else:
        parts.append(f"no answer was found within the usage limit {p.usage_limit}")
        if run.excess is not None:
            parts.append(f"the nearest was over it by {run.excess}")
    if least is not None:
        at_most = "" if least == proven else "at most "
        parts.append(f"the least limit that would do is {at_most}{least}")
    return NoFeasibleAnswer("; ".join(parts), least, proven)


def _least_peak(p: Problem, example: Ints, proven: int) -> tuple[Ints, int]:
    """A choice of smaller peak, and a greater limit below which there is none.

    They meet where the graph is narrow enough for exact elimination and the work allowed is enough:
    the limit is halved between them, and with all costs zero the search only says whether a
    choice keeps to it.
    """
    free = replace(
        p,
        cost=np.where(p.cost >= FORBIDDEN, p.cost, 0),
        edge_cost=np.where(p.edge_cost >= FORBIDDEN, p.edge_cost, 0),
    )
    started, left = time.perf_counter(), EVALUATIONS
    while proven < p.peak(example):
        limit = (proven + p.peak(example)) // 2
        wall_s = started + SECONDS - time.perf_counter()
        with Run(replace(free, usage_limit=limit), Budget(left, wall_s), "least limit") as run:
            ready = shrunk(run)
            if ready is not None and elimination_cells(ready[0], NARROW) <= NARROW:
                branch_and_bound(run, *ready)
        if run.interrupted:
            raise KeyboardInterrupt
        left -= run.evaluations
        if run.choice is not None:
            example = run.choice.astype(np.int64)
        elif run.lower_bound == np.inf:
            proven = limit + 1
        else:
            break
    return example, proven


def _least_peak_bound(p: Problem) -> int:
    """The peak of every node's least usage: no choice has a lower one."""
    order = np.lexsort((p.usage, np.repeat(np.arange(p.num_nodes), p.num_strategies)))
    return p.peak(order[p.strategy_start[:-1]] - p.strategy_start[:-1])


def _frugal_choice(p: Problem, late: Callable[[], bool]) -> Ints | None:
    """An allowed choice of small peak: that of the least sum of usages.

    When it is ``late`` already, shrinking does not take long.
    """
    life = np.repeat(p.interval[:, 0] < p.interval[:, 1], p.num_strategies)
    top = max(int(p.usage.max(initial=0)), 1)
    usage = (p.usage // (top // 10**9 + 1)) * life
    frugal = replace(
        p,
        cost=np.where(p.cost >= FORBIDDEN, p.cost, usage),
        edge_cost=np.where(p.edge_cost >= FORBIDDEN, p.edge_cost, 0),
        usage_limit=NO_LIMIT,
    )
    try:
        model, lift = shrink(frugal, enough=late)
    except Contradiction:
        return None
    _, x = Elimination(model, table_share(model, CELLS)).minimum(model.unary)
    choice = lift(x)
    if p.allowed(choice):
        return choice
    if not model.num_vars:  # shrinking met that everything is forbidden
        return None
    greedy = Run(frugal, Budget(), "least memory")
    first_answer(greedy, model, lift)
    return None if greedy.choice is None else greedy.choice.astype(np.int64)
