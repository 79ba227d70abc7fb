"""The problem as an integer linear program, solved by HiGHS: through OR-Tools MathOpt, or where it
is small by scipy.

    x_{v,l} in {0, 1},  y_{e,ij} >= 0
    sum_l x_{v,l} = 1                                for every variable v
    sum_j y_{e,ij} = x_{a,i},  sum_i y_{e,ij} = x_{b,j}    for every edge e = {a, b}
    sum_v usage_{v,r}(x_v) <= room_r                 for the memory rows that were ever overfilled

Linking each edge by its row and column sums makes the relaxation that of the local polytope, as
strong as the bound of TRW-S; linking cell by cell would be nearly worthless.  Of the thousands of
memory rows few matter: they are added when an answer overfills them and the program is solved
again (a cutting plane method; every intermediate optimum is a lower bound).  Labels that cost the
same up to a constant on every edge row share their y's.  One evaluation is one variable per solve.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers import highs
from autopar.searchers.descent import make_fit, polish
from autopar.searchers.gather import Lift
from autopar.searchers.linear_rows import message, program
from autopar.searchers.memory_prices import overfull_rows
from autopar.searchers.model import Model
from autopar.searchers.run import Run
from autopar.searchers.small_programs import is_small, solve_here
from autopar.searchers.starts import LARGE, first_answer, shrunk

DEFAULT_S = 60.0  # for all solves of a model, when no budget is given
UPPER_S = 1800.0  # the same for a budget in evaluations: there only against endless programs
BUILD_S = 1e-5  # for each edge cell, to build a program and to hand it over
NODES = 2000  # of branch and bound per solve at most, when the clock does not decide


def search(run: Run, seed: int) -> None:
    """Exact when it ends; see the module."""
    smaller = shrunk(run)
    if smaller is not None:
        model, lift = smaller
        tree = first_answer(run, model, lift) if model.start[-1] > LARGE else None
        solve(run, model, lift, hint=None if tree is None else tree.choice, seed=seed)


def solve(
    run: Run,
    m: Model,
    lift: Lift,
    rows: Ints | None = None,
    hint: Ints | None = None,
    proves: bool = True,
    limit_s: float = math.inf,
    seed: int = 0,
    offer: Callable[[Ints], None] | None = None,
) -> bool:
    """Solve a model, offering choices and, where ``proves``, bounds.

    ``rows`` are memory rows to begin with, ``hint`` a good choice.  Returns True when the model was
    solved to the end, so that no better choice exists in it.
    """
    known: list[int] = [] if rows is None else rows.tolist()
    if run.budget.wall_s is None:
        limit_s = min(limit_s, DEFAULT_S if run.budget.evaluations is None else UPPER_S)
    deadline = run.wall_s + limit_s
    while True:
        left = min(deadline - run.wall_s, run.remaining_s)
        if left <= max(0.05, BUILD_S * len(m.edge_cost)):
            run.budget_spent = True
            return False
        nodes = None
        if run.budget.wall_s is None:
            nodes = int(min(NODES, 1 + run.remaining_evaluations // max(m.num_vars, 1)))
        outcome, x = _solve_once(
            m, np.array(known, np.int64), left, nodes, _gaps(run), seed, hint, run.tick
        )
        if proves and np.isfinite(outcome.bound):
            run.bound(outcome.bound - 1e-9 * abs(outcome.bound), "integer program")
        run.budget_spent |= outcome.status == "stopped"
        if outcome.status == "infeasible":
            if proves:
                run.bound(math.inf if run.cost is None else float(run.cost), "integer program")
            return True
        if x is None:
            run.spend((1 + outcome.nodes) * m.num_vars)
            return False
        over = m.load(x) - m.room
        fits = bool((over <= 0).all())
        fitted = x if fits else make_fit(m, x, m.unary, run.tick)
        if fitted is not None:
            fitted = fitted if fits else polish(m, fitted)
            run.offer(lift(fitted), "integer program" if fits else "integer program, repaired")
            if offer is not None:
                offer(fitted)
        run.spend((1 + outcome.nodes) * m.num_vars)
        if fits:
            return outcome.status == "optimal"
        new = [r for r in overfull_rows(over) if r not in known]
        if not new or run.closed:
            return False
        known += new


def _gaps(run: Run) -> tuple[float, float]:
    """The relative and the absolute gap at which HiGHS may end: what was asked for, or nothing.

    What was asked for is relative to costs with the offset.  An offset above zero makes that more
    than the same share of the cost without; otherwise only what every answer costs at least counts.
    """
    asked = max(run.budget.gap, 0.0)
    least = 0.0 if math.isinf(run.lower_bound) else run.lower_bound + run.offset
    most = 0.0 if run.cost is None else -float(run.cost + run.offset)
    relative = asked if run.offset >= 0 else 0.0
    return max(relative, 1e-9), max(asked * max(least, most, 0.0), 0.5)


def _solve_once(
    m: Model,
    rows: Ints,
    limit_s: float,
    nodes: int | None,
    gaps: tuple[float, float],
    seed: int,
    hint: Ints | None,
    tick: Callable[[], None],
) -> tuple[highs.Answer, Ints | None]:
    """The answer with its bound in the model's units, and the best choice.

    ``gaps`` are the relative and the absolute one at which HiGHS may end.  ``tick`` is called often
    while the program is built, which counts towards the limit.
    """
    began = time.perf_counter()
    scale = max(1.0, float(np.abs(m.unary[np.isfinite(m.unary)]).max(initial=0.0)) / 1e6)
    if hint is not None:
        scale = max(1.0, abs(m.cost(hint)) / 1e6)
    made = program(m, rows, scale, tick)
    if is_small(made):
        answer = solve_here(made, limit_s, nodes, gaps[0])
    else:
        text = message(made).SerializeToString()
        answer = highs.solve(
            highs.Request(
                program=text,
                columns=made.labels,
                limit_s=max(limit_s - (time.perf_counter() - began), 0.01),
                nodes=nodes,
                relative_gap=gaps[0],
                absolute_gap=gaps[1] / scale,
                seed=seed,
                hint=() if hint is None else tuple((m.start[:-1] + hint).tolist()),
            )
        )
    answer = replace(answer, bound=answer.bound * scale)
    if answer.values is None:
        return answer, None
    labels = zip(m.start[:-1], m.start[1:], strict=True)
    return answer, np.array([int(answer.values[lo:hi].argmax()) for lo, hi in labels], np.int64)
