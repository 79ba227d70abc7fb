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

The usage limit enters through prices p >= 0 per memory row: g(p) = bound(unary + p . usage)
- p . room is a lower bound for every p.  After each pass the prices take a step along the decoded
choice's excess (a subgradient, smoothed), of Polyak's length (1969) for the gap to the best answer;
when the bound stalls, the step shrinks and the prices return to the best.  Only the fullest row of
each overfull stretch is ever priced (``overfull_rows``): thousands of nearly equal rows would
each count the same excess.  One evaluation is one variable passed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import Ints
from autopar.searchers.arcs import Arcs, arcs, big_cost
from autopar.searchers.gather import Lift
from autopar.searchers.memory_prices import overfull_rows
from autopar.searchers.memory_tree import MemoryTree, repair
from autopar.searchers.model import Floats, Model, dot
from autopar.searchers.run import Run

WARM_UP = 20  # passes before the first prices
PATIENCE = 15  # passes without progress before the step shrinks
SHRINK = 0.7
SMALLEST_STEP = 1e-6
REPAIR_EVERY = 20
LOOK_EVERY = 250  # passes, after which the bound must have risen by
WORTH = 0.02  # of the gap; in so many the step can shrink 300 times, and prices find their way


@dataclass
class Dual:
    """The state of the ascent on one model: messages, prices, bound, best choice found."""

    model: Model
    run: Run
    lift: Lift
    before: Dual | None = None  # the dual of a larger model of the same problem
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
        self._priced_rows = np.zeros(len(m.room), bool)
        if self.before is not None and len(m.room):
            had = np.flatnonzero(self.before.price > 0)
            at = nearest(m.moment, self.before.model.moment[had])
            np.add.at(self.price, at, self.before.price[had])
            self._priced_rows[at] = True
            self.before = None
        self.message = np.zeros(self.arcs.message_start[-1])
        self.reduced = np.zeros(m.start[-1])
        self._now = self.price
        self._decoded = np.zeros(m.num_vars, np.int64)
        self._direction = np.zeros(len(m.room))
        self._stalled = 0
        self._mark = -math.inf

    @cached_property
    def arcs(self) -> Arcs:
        return arcs(self.model, self.big)

    @cached_property
    def big(self) -> float:
        return big_cost(self.model)

    @property
    def converged(self) -> bool:
        return self.step < SMALLEST_STEP

    @property
    def pass_evaluations(self) -> int:
        """Of one pass there and back."""
        return 2 * self.model.num_vars

    @property
    def gap(self) -> float:
        """What the best answer and the bound leave open, in cost."""
        if math.isinf(self.known):
            return 0.05 * self._size
        return max(self.known - self.bound, 0.0)

    @property
    def reach(self) -> float:
        """By how much a step may expect the bound to rise."""
        return min(self.gap, 0.1 * self._size)

    @property
    def _size(self) -> float:
        """That of the bound.  A first answer may be many times too dear, so it counts little, but
        for something: the bound may be zero."""
        other = self._spread if math.isinf(self.known) else abs(self.known)
        return max(abs(self.bound), 1e-3 * other)

    @cached_property
    def _spread(self) -> float:
        """What choosing the dearest label of every variable would cost beyond the cheapest."""
        m = self.model
        unary = np.where(np.isfinite(m.unary), m.unary, -np.inf)
        spread = np.maximum.reduceat(unary, m.start[:-1]) - np.minimum.reduceat(
            m.unary, m.start[:-1]
        )
        return float(spread[np.isfinite(spread)].sum())

    @property
    def known(self) -> float:
        """The cost of the best answer, found here or before."""
        return self.upper if self.run.cost is None else min(self.upper, float(self.run.cost))

    def ascend(self, passes: int, until_s: float = math.inf, evaluations: float = math.inf) -> None:
        """Up to so many passes there and back, and up to so many evaluations.

        Ends early when converged, when the gap is closed, or when the bound hardly closes it.
        """
        mark = self.bound
        enough = self.run.evaluations + evaluations - self.pass_evaluations
        for i in range(passes):
            if self.converged or self.run.wall_s > until_s or self.run.evaluations > enough:
                return
            if i % LOOK_EVERY == LOOK_EVERY - 1:
                if self.bound - mark < WORTH * self.gap:
                    return
                mark = self.bound
            if self.known - self.bound <= self.run.allowed_gap(self.known):
                return
            self._pass()
            if self.passes > WARM_UP and len(self.model.room):
                self._move_prices()
            elif not len(self.model.room):
                self._notice_stall()

    def _pass(self) -> None:
        unary = self._capped(self._now)
        self._sweep(unary, self._now, False)
        value = self._sweep(unary, self._now, True)
        self.passes += 1
        if value > self.bound:
            self.bound, self.price = value, self._now
            self.run.bound(value, "trws")
        self._offer(unary)
        self.run.spend(self.pass_evaluations)

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
            if not repair(m, self.arcs, tree, unary, self.run.tick):
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
        square = dot(move, move)
        if square > 0:
            length = self.step * self.reach / square
            self._now = np.maximum(0.0, self._now + length * move)

    def _notice_stall(self) -> None:
        if self.bound > self._mark + 1e-2 * self.step * self.reach:
            self._mark, self._stalled = self.bound, 0
        self._stalled += 1
        if self._stalled > PATIENCE:
            self.step *= SHRINK
            self._stalled, self._mark = 0, self.bound
            self._now = self.price
            self._direction[:] = 0.0

    def reduced_costs(self, passes: int = 10) -> Floats:
        """By how much choosing a label raises the bound at the best prices, per label."""
        m = self.model
        unary = self._capped(self.price)
        best = np.zeros(m.start[-1])
        before = -math.inf
        for i in range(2 * passes):
            value = self._sweep(unary, self.price, i % 2 == 1)
            if np.isfinite(before):
                np.maximum(best, before + self.reduced - self.bound, out=best)
            before = value
        self.run.spend(2 * passes * m.num_vars)
        return best

    def open_labels(self, upper: float) -> npt.NDArray[np.bool_]:
        """A mask of the labels that an answer of cost at most ``upper`` may contain."""
        reduced = self.reduced_costs()
        return np.asarray(self.bound + reduced <= upper + 1e-9 * abs(upper))

    def decode(self, price: Floats) -> Ints:
        """A choice at other prices."""
        unary = self._capped(price)
        for i in range(6):
            self._sweep(unary, price, i % 2 == 1)
        return self._decoded.copy()

    def busy_rows(self, m: Model) -> Ints:
        """The rows of another model of the same problem that are nearest to priced ones here."""
        moments = self.model.moment[self.price > 0]
        if not len(m.moment) or not len(moments):
            return np.zeros(0, np.int64)
        return np.unique(nearest(m.moment, moments))

    def _capped(self, price: Floats) -> Floats:
        return np.minimum(self.model.priced(price), self.big)

    def _sweep(self, unary: Floats, price: Floats, backwards: bool) -> float:
        from autopar.searchers.trws_kernels import sweep

        m = self.model
        value = sweep(self.arcs, unary, self.message, backwards, self.reduced, self._decoded)
        return float(value) + m.constant - dot(price, m.room)


def nearest(places: Ints, wanted: Ints) -> Ints:
    """For each wanted number the index of the nearest of the sorted ``places``."""
    right = np.searchsorted(places, wanted).clip(1, max(len(places) - 1, 1))
    left = right - 1
    right = np.minimum(right, len(places) - 1)
    closer = wanted - places[left] <= places[right] - wanted
    return np.asarray(np.where(closer, left, right))


def _near(over: Floats, row: int) -> npt.NDArray[np.bool_]:
    """The overfull stretch around a row."""
    out = np.zeros(len(over), bool)
    full = over > 0
    lo = row - int(np.argmin(full[row::-1])) + 1 if not full[: row + 1].all() else 0
    hi = row + int(np.argmin(full[row:])) if not full[row:].all() else len(over)
    out[lo:hi] = True
    return out
