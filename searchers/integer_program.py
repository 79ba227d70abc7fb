"""The problem as an integer linear program, solved by HiGHS through OR-Tools MathOpt.

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
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np

from autopar.nouns.problem import Ints, Problem, Solution
from autopar.searchers.descent import make_fit, polish
from autopar.searchers.gather import Lift
from autopar.searchers.linear_rows import program
from autopar.searchers.memory_prices import overfull_rows
from autopar.searchers.model import Model
from autopar.searchers.run import NO_BUDGET, Budget, Report, Run
from autopar.searchers.shrink import Contradiction, shrink

DEFAULT_S = 60.0  # for all solves of a model, when no budget is given
UPPER_S = 1800.0  # the same for a budget in evaluations: there only against endless programs
NODES = 2000  # of branch and bound per solve, when the clock does not decide


def search(
    problem: Problem,
    budget: Budget = NO_BUDGET,
    seed: int = 0,
    progress: Report | None = None,
) -> Solution:
    """Exact when it ends; see the module."""
    with Run(problem, budget, "integer_program", progress) as run:
        try:
            model, lift = shrink(problem, run.tell if progress else None)
        except Contradiction:
            run.bound(np.inf, "everything is forbidden")
        else:
            solve(run, model, lift, seed=seed)
    return run.solution()


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
        if left <= 0.05:
            return False
        gap = max(run.budget.gap, 0.0)
        nodes = NODES if run.budget.wall_s is None else None
        result = _solve_once(m, np.array(known, np.int64), left, nodes, gap, seed, hint)
        run.spend(m.num_vars)
        if result is None:
            return False
        status, bound, x = result
        if proves and np.isfinite(bound):
            run.bound(bound - 1e-9 * abs(bound), "integer program")
        run.budget_spent |= status == "stopped"
        if status == "infeasible":
            if proves:
                run.bound(math.inf if run.cost is None else float(run.cost), "integer program")
            return True
        if x is None:
            return False
        over = m.load(x) - m.room
        if (over <= 0).all():
            run.offer(lift(x), "integer program")
            if offer is not None:
                offer(x)
            return status == "optimal"
        fitted = make_fit(m, x, m.unary)
        if fitted is not None:
            fitted = polish(m, fitted)
            run.offer(lift(fitted), "integer program, repaired")
            if offer is not None:
                offer(fitted)
        new = [r for r in overfull_rows(over) if r not in known]
        if not new or run.closed:
            return False
        known += new


def _solve_once(
    m: Model,
    rows: Ints,
    limit_s: float,
    nodes: int | None,
    gap: float,
    seed: int,
    hint: Ints | None,
) -> tuple[str, float, Ints | None] | None:
    """Status ("optimal", "infeasible", "stopped"), bound, and the best choice."""
    from ortools.math_opt.python import mathopt

    scale = max(1.0, float(np.abs(m.unary[np.isfinite(m.unary)]).max(initial=0.0)) / 1e6)
    if hint is not None:
        scale = max(1.0, abs(m.cost(hint)) / 1e6)
    model = mathopt.Model.from_model_proto(program(m, rows, scale))
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=limit_s),
        node_limit=nodes,
        relative_gap_tolerance=max(gap, 1e-9),
        absolute_gap_tolerance=0.5 / scale,
        random_seed=seed,
    )
    start = mathopt.ModelSolveParameters()
    if hint is not None:
        taken = m.start[:-1] + hint
        start.solution_hints.append(
            mathopt.SolutionHint(variable_values={model.get_variable(int(i)): 1.0 for i in taken})
        )
    with quiet_stdout():
        result = mathopt.solve(
            model, mathopt.SolverType.HIGHS, params=parameters, model_params=start
        )
    reason = result.termination.reason
    bound = result.termination.objective_bounds.dual_bound * scale
    if reason == mathopt.TerminationReason.INFEASIBLE:
        return "infeasible", math.inf, None
    if not result.has_primal_feasible_solution():
        return "stopped", bound, None
    labels = m.start[-1]
    values = result.variable_values([model.get_variable(i) for i in range(labels)])
    taken = np.array(values)
    x = np.array(
        [int(np.argmax(taken[lo:hi])) for lo, hi in zip(m.start[:-1], m.start[1:], strict=True)],
        np.int64,
    )
    status = "optimal" if reason == mathopt.TerminationReason.OPTIMAL else "stopped"
    return status, bound, x


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """HiGHS prints now and then, whatever it is told: send that to stderr, which is for people."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
