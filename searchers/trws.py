"""Tree-reweighted message passing, with prices on memory moved at every pass.

TRW-S (Kolmogorov 2006, "Convergent tree-reweighted message passing for energy minimization")
maximises the bound of the local polytope by passing messages along an order of the variables and
back.  Variable v with n_v = max(later neighbours, earlier neighbours) lies on n_v monotonic chains,
and one pass computes

    total_v  = unary_v + sum_w M_{w->v}
    M_{v->w} = min_{x_v} [ total_v / n_v - M_{w->v} + edge_vw ]      (less its own minimum)
    bound    = sum of the minima taken off totals and messages

The bound never falls from pass to pass.  Any label l may be ruled out when
bound + total_v(l) - min total_v exceeds the cost of a known answer.

The usage limit enters through prices p >= 0 per memory row: g(p) = bound(unary + p . usage) - p . room
is a lower bound for every p.  After each pass the prices take a step along the decoded choice's
excess (a subgradient, smoothed), of Polyak's length (1969) for the gap to the best answer so far;
when the bound stalls, the step shrinks and the prices return to the best.  Only the fullest row of
each overfull stretch is ever priced (``overfull_rows``): thousands of nearly equal rows would
each count the same excess.  One evaluation is one variable passed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.arcs import arcs
from autopar.searchers.gather import Lift, keep_labels
from autopar.searchers.memory_prices import overfull_rows
from autopar.searchers.memory_tree import MemoryTree, repair
from autopar.searchers.model import Floats, Model
from autopar.searchers.run import Run

WARM_UP = 20  # passes before the first prices
PATIENCE = 15  # passes without progress before the step shrinks
SHRINK = 0.7
SMALLEST_STEP = 1e-6
REPAIR_EVERY = 20


def big_cost(m: Model) -> float:
    """What stands for infinity: above every finite choice, small enough to keep doubles exact."""
    unary = m.unary[np.isfinite(m.unary)]
    cells = m.edge_cost[np.isfinite(m.edge_cost)]
    return 4.0 * max(float(np.abs(unary).max(initial=1.0)), float(np.abs(cells).max(initial=1.0)))


@dataclass
class Dual:
    """The state of the ascent on one model: messages, prices, bound, best choice found."""

    model: Model
    run: Run
    lift: Lift
    upper: float = math.inf
    choice: Ints | None = None
    bound: float = -math.inf
    step: float = 1.0
    passes: int = 0
    price: Floats = field(init=False)
    message: Floats = field(init=False)
    reduced: Floats = field(init=False)

    def __post_init__(self) -> None:
        m = self.model
        self.price = np.zeros(len(m.room))
        self.message = np.zeros(self.arcs.message_start[-1])
        self.reduced = np.zeros(m.start[-1])
        self._now = self.price
        self._decoded = np.zeros(m.num_vars, np.int64)
        self._priced_rows = np.zeros(len(m.room), bool)
        self._direction = np.zeros(len(m.room))
        self._stalled = 0
        self._mark = -math.inf

    @cached_property
    def arcs(self):  # type: ignore[no-untyped-def]
        return arcs(self.model, big_cost(self.model))

    @property
    def converged(self) -> bool:
        return self.step < SMALLEST_STEP

    @property
    def gap(self) -> float:
        """What the best answer and the bound leave open, in cost."""
        if math.isinf(self.upper):
            return 0.05 * abs(self.bound)
        return max(self.upper - self.bound, 0.0)

    def ascend(self, passes: int, until_s: float = math.inf) -> None:
        """Up to so many passes there and back; ends early when converged or the gap is closed."""
        for _ in range(passes):
            if self.converged or self.run.wall_s > until_s:
                return
            if self.upper - self.bound <= self.run.budget.gap * abs(self.upper):
                return
            self._pass()
            if self.passes > WARM_UP and len(self.model.room):
                self._move_prices()
            elif not len(self.model.room):
                self._notice_stall()

    def _pass(self) -> None:
        from autopar.searchers.trws_kernels import sweep

        m = self.model
        unary = m.priced(self._now)
        np.minimum(unary, big_cost(m), out=unary)
        sweep(*self.arcs, unary, self.message, False, self.reduced, self._decoded)
        value = sweep(*self.arcs, unary, self.message, True, self.reduced, self._decoded)
        value += m.constant - float(self._now @ m.room)
        self.passes += 1
        self.last = value
        if value > self.bound:
            self.bound, self.price = value, self._now
            self.run.bound(value, "trws")
        self._offer(unary)
        self.run.spend(2 * m.num_vars)

    def _offer(self, unary: Floats) -> None:
        """Take the decoded choice if it fits; now and then make it fit."""
        m, x = self.model, self._decoded
        cost = m.cost(x)
        if cost >= self.upper:
            return
        if not m.fits(x):
            if self.passes % REPAIR_EVERY:
                return
            tree = MemoryTree(m, x.copy())
            if not repair(m, self.arcs, tree, unary):
                return
            x = tree.choice
            cost = m.cost(x)
        if cost < self.upper:
            self.upper, self.choice = cost, x.copy()
            self.run.offer(self.lift(self.choice), "trws")

    def _move_prices(self) -> None:
        m = self.model
        over = m.load(self._decoded) - m.room
        self._notice_stall()
        for row in overfull_rows(over):
            rivals = over[self._priced_rows & _near(over, row)]
            if over[row] > rivals.max(initial=0.0) + (1e-3 * m.room[row] if len(rivals) else 0.0):
                self._priced_rows[row] = True
        slope = np.where(self._priced_rows, over, 0.0)
        slope[(self._now <= 0) & (slope < 0)] = 0.0
        self._direction = 0.7 * self._direction + 0.3 * slope
        move = np.where((self._now <= 0) & (self._direction < 0), 0.0, self._direction)
        square = float(move @ move)
        if square > 0:
            length = self.step * min(self.gap, 0.1 * abs(self.bound)) / square
            self._now = np.maximum(0.0, self._now + length * move)

    def _notice_stall(self) -> None:
        if self.bound > self._mark + 1e-2 * self.step * min(self.gap, 0.1 * abs(self.bound)):
            self._mark, self._stalled = self.bound, 0
        self._stalled += 1
        if self._stalled > PATIENCE:
            self.step *= SHRINK
            self._stalled, self._mark = 0, self.bound
            self._now = self.price
            self._direction[:] = 0.0

    def open_labels(self, upper: float, passes: int = 10) -> np.ndarray:
        """A mask of the labels that an answer of cost at most ``upper`` may contain."""
        m = self.model
        self._now = self.price
        unary = m.priced(self.price)
        np.minimum(unary, big_cost(m), out=unary)
        keep = np.ones(m.start[-1], bool)
        from autopar.searchers.trws_kernels import sweep

        before = -math.inf
        for i in range(2 * passes):
            value = sweep(*self.arcs, unary, self.message, i % 2 == 1, self.reduced, self._decoded)
            value += m.constant - float(self.price @ m.room)
            if np.isfinite(before):
                keep &= before + self.reduced <= upper + 1e-9 * abs(upper)
            before = value
        self.run.spend(2 * passes * m.num_vars)
        return keep


def _near(over: Floats, row: int) -> np.ndarray:
    """The overfull stretch around a row."""
    out = np.zeros(len(over), bool)
    full = over > 0
    lo = row - int(np.argmin(full[row::-1])) + 1 if not full[: row + 1].all() else 0
    hi = row + int(np.argmin(full[row:])) if not full[row:].all() else len(over)
    out[lo:hi] = True
    return out


def rule_out(dual: Dual, upper: float) -> tuple[Model, Lift] | None:
    """The model without the labels that no answer of cost at most ``upper`` contains.

    None when some variable has none left: then there is no such answer.
    """
    m = dual.model
    keep = dual.open_labels(upper)
    if (np.add.reduceat(keep, m.start[:-1]) == 0).any():
        return None
    smaller, lift = keep_labels(m, keep)
    return smaller, lift
