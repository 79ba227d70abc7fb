"""What every searcher shares: a budget, the best answer so far, the best bound so far.

A searcher is a function

    search(run, seed) -> None

that offers choices and bounds to the run.  ``registry`` calls it inside ``with Run(...) as run``,
which ends early, without an error, when the budget is spent or the user presses Ctrl-C.  One
*evaluation* is one node whose strategies were compared once, so a sweep over a graph of n nodes
counts n.

What all strategies of a node cost, and all cells of an edge, no choice can avoid.  ``Run`` takes it
off before the search, exactly, and adds it again to what it reports and returns:

    cost'_i(k) = cost_i(k) - least_i,    offset = sum_i least_i

so that tolerances, steps and temperatures never depend on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import FORBIDDEN, Ints, Problem, exact_sum
from autopar.nouns.solution import Choice, Solution


@dataclass(frozen=True)
class Budget:
    """How long to search: ``evaluations`` is deterministic, ``wall_s`` an upper stop; None: no end.

    The search also ends when the answer is within ``gap`` of the bound, relative to the answer.
    """

    evaluations: int | None = None
    wall_s: float | None = None
    gap: float = 0.0


@dataclass(frozen=True)
class Progress:
    """What ``progress`` is called with whenever the answer or the bound improves.

    ``cost`` is None before the first feasible answer.  ``note`` is for people: a step's name and
    what it did.
    """

    searcher: str
    cost: int | None
    lower_bound: float
    evaluations: int
    wall_s: float
    note: str = ""


Report = Callable[[Progress], None]

NO_BUDGET = Budget()
"""Search until the searcher itself sees no reason to go on."""


class BudgetSpent(Exception):
    """Raised inside a searcher when its budget is used up; ``Run`` catches it."""


def without_offset(p: Problem) -> tuple[Problem, int]:
    """The problem less what no choice can avoid, and how much that is in all."""
    cost, of_nodes = _less_least(p.cost, p.strategy_start)
    edge_cost, of_edges = _less_least(p.edge_cost, p.edge_start)
    if cost is p.cost and edge_cost is p.edge_cost:
        return p, 0
    return replace(p, cost=cost, edge_cost=edge_cost), of_nodes + of_edges


def _less_least(values: Ints, start: Ints) -> tuple[Ints, int]:
    """Each block of costs less its least one, and the sum of these; forbidden ones stay.

    Where the block's largest cost would become a forbidden one, less is taken off.
    """
    if not len(values):
        return values, 0
    least = np.minimum.reduceat(values, start[:-1])
    if ((least == 0) | (least >= FORBIDDEN)).all():
        return values, 0
    allowed = values < FORBIDDEN
    if allowed.all():
        most = np.maximum.reduceat(values, start[:-1])
    else:
        most = np.maximum.reduceat(np.where(allowed, values, -FORBIDDEN), start[:-1])
    shift = np.where(least < FORBIDDEN, np.maximum(least, most - (FORBIDDEN - 1)), 0)
    return values - np.where(allowed, np.repeat(shift, np.diff(start)), 0), exact_sum(shift)


class Run:
    """One search: clock, incumbent and bound.

    ``problem``, ``cost`` and ``lower_bound`` are without the ``offset``.
    """

    def __init__(
        self, problem: Problem, budget: Budget, searcher: str, progress: Report | None = None
    ) -> None:
        self.problem, self.offset = without_offset(problem)
        self.budget = budget
        self.searcher = searcher
        self.progress = progress
        self.started = time.perf_counter()
        self.evaluations = 0
        self.choice: Choice | None = None
        self.cost: int | None = None
        self.found_by = searcher
        self.lower_bound = -math.inf
        self.budget_spent = False
        self.interrupted = False
        self.excess: int | None = None

    # -- budget --------------------------------------------------------------------------------

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self.started

    @property
    def remaining_s(self) -> float:
        return math.inf if self.budget.wall_s is None else self.budget.wall_s - self.wall_s

    @property
    def remaining_evaluations(self) -> float:
        limit = self.budget.evaluations
        return math.inf if limit is None else limit - self.evaluations

    def share_s(self, share: float) -> float:
        """This share of the seconds that are left now."""
        return share * self.remaining_s

    def spent(self, share: float) -> Callable[[], bool]:
        """A clock that says when this share of the seconds left now is used up; else never."""
        until = self.wall_s + self.share_s(share)
        return lambda: self.wall_s > until

    def spend(self, evaluations: int) -> None:
        """Count work done; ends the search when the budget is used up."""
        self.evaluations += evaluations
        if self.remaining_evaluations <= 0 or self.remaining_s <= 0:
            raise BudgetSpent

    def tick(self) -> None:
        """Ends the search when the budget is used up; for the inside of long steps."""
        self.spend(0)

    # -- what is known -------------------------------------------------------------------------

    def offer(self, choice: npt.ArrayLike, found_by: str = "") -> bool:
        """Keep a choice when it is feasible and better, by the exact evaluator; True if kept."""
        x = np.asarray(choice, np.int32)
        if not self.problem.allowed(x):
            return False
        over = self.problem.excess(x)
        if over > 0:
            self.excess = over if self.excess is None else min(over, self.excess)
            return False
        cost = self.problem.total(x)
        if self.cost is not None and cost >= self.cost:
            return False
        self.choice, self.cost = x.copy(), cost
        self.found_by = f"{self.searcher}: {found_by}" if found_by else self.searcher
        self.report(found_by)
        return True

    def bound(self, lower_bound: float, note: str = "") -> None:
        """Keep a lower bound on every feasible choice when it is better.

        All costs are integers, so a bound is rounded up, after taking off what doubles may have
        lost: 1e-12 of its size once it leaves the range where they are exact.
        """
        if math.isfinite(lower_bound):
            whole = lower_bound == math.floor(lower_bound) and abs(lower_bound) < 2**53
            slack = 0.0 if whole else 1e-12 * abs(lower_bound) + 1e-9
            lower_bound = float(math.ceil(lower_bound - slack))
        if lower_bound > self.lower_bound:
            self.lower_bound = lower_bound
            self.report(note)

    @property
    def closed(self) -> bool:
        """True when the best choice is proven to be as good as was asked for."""
        if self.cost is None:
            return self.lower_bound == math.inf
        return self.cost - self.lower_bound <= self.allowed_gap(self.cost)

    def allowed_gap(self, cost: float) -> float:
        """How far an answer of this cost may be from the bound, in cost."""
        return self.budget.gap * abs(cost + self.offset)

    def report(self, note: str = "") -> None:
        if self.progress is not None:
            self.progress(
                Progress(
                    self.searcher,
                    None if self.cost is None else self.cost + self.offset,
                    self._with_offset(self.lower_bound),
                    self.evaluations,
                    self.wall_s,
                    note,
                )
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        spent = kind is not None and issubclass(kind, BudgetSpent)
        self.budget_spent = (self.budget_spent or spent) and not self.closed
        self.interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if self.interrupted and self.choice is None:
            return False
        return spent or self.interrupted

    def solution(self) -> Solution:
        """The best so far; there must be one, else ``least_limit`` explains why not."""
        assert self.choice is not None
        assert self.cost is not None
        return Solution(
            choice=self.choice,
            cost=self.cost + self.offset,
            lower_bound=self._with_offset(min(self.lower_bound, self.cost)),
            peak=self.problem.peak(self.choice),
            found_by=self.found_by,
            evaluations=self.evaluations,
            budget_spent=self.budget_spent,
            interrupted=self.interrupted,
        )

    def _with_offset(self, bound: float) -> float:
        """A bound of the problem with its offset: rounded down, unless the cost has met it."""
        if not math.isfinite(bound):
            return bound
        exact = math.floor(bound) + self.offset
        rounded = float(exact)
        met = self.cost is not None and self.cost <= bound
        return rounded if met or rounded <= exact else math.nextafter(rounded, -math.inf)
