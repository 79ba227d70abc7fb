"""Prices on memory: the Lagrangian dual of the usage limit, by cutting planes.

    max_{p >= 0}  g(p),      g(p) = min_x [ cost(x) + sum_r p_r (load_r(x) - room_r) ]

Every choice x met so far gives the cut g(p) <= cost(x) + p . (load(x) - room).  The next prices
maximise the least cut (Kelley 1960; the dual of Dantzig-Wolfe column generation) over a box,
pulled towards the best prices so far (Wentges 1997).  Only rows that some choice overfilled get a
price.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.model import Floats, Model


def overfull_rows(over: Floats) -> list[int]:
    """The fullest row of every stretch of rows that are over their room.

    Neighbouring rows have nearly the same terms, so pricing or constraining one of each stretch
    makes progress where all of them at once would count the same excess a thousand times.
    """
    full = np.flatnonzero(over > 0)
    if not len(full):
        return []
    stretches = np.split(full, np.flatnonzero(np.diff(full) > 1) + 1)
    return [int(s[over[s].argmax()]) for s in stretches]


@dataclass
class Cuts:
    """The choices met so far, as cuts on the dual; ``rows`` are those that may have a price."""

    model: Model
    rows: list[int] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    excess: list[Floats] = field(default_factory=list)

    def add(self, x: Ints) -> Floats:
        """Record a choice; returns how far it overfills each row (negative: room left)."""
        over = self.model.load(x) - self.model.room
        self.costs.append(self.model.cost(x))
        self.excess.append(over)
        if len(over) and over.max() > 0:
            self.rows += [r for r in overfull_rows(over) if r not in self.rows]
        return over

    def best_prices(self, box: float) -> tuple[float, Floats]:
        """Prices in [0, box] that maximise the least cut, and that value (an upper bound on g)."""
        from scipy.optimize import linprog

        rows = np.array(self.rows)
        a = np.array([over[rows] for over in self.excess])
        scale = np.abs(a).max() or 1.0
        unit = max(np.ptp(self.costs), 1.0)
        shift = min(self.costs)
        # theta <= cost + p . excess, in units in which both are of order one.
        system = np.hstack([np.ones((len(a), 1)), -a / scale])
        result = linprog(
            c=[-1.0] + [0.0] * len(rows),
            A_ub=system,
            b_ub=(np.array(self.costs) - shift) / unit,
            bounds=[(None, None)] + [(0.0, box * scale / unit)] * len(rows),
            method="highs",
        )
        price = np.zeros(len(self.model.room))
        if result.x is None:
            return np.inf, price
        price[rows] = np.maximum(result.x[1:], 0.0) * unit / scale
        return float(result.x[0]) * unit + shift, price


@dataclass
class Ascent:
    """The state of the dual's maximisation; feed it with ``step`` until ``done``."""

    cuts: Cuts
    price: Floats  # the best so far
    value: float = -np.inf
    ceiling: float = np.inf  # no prices inside the box give more
    box: float = 0.0
    pull: float = 0.5

    def next_prices(self) -> Floats:
        """Where to look next."""
        if not self.cuts.rows:
            return self.price
        if self.box == 0.0:
            over = max(float(e[self.cuts.rows].max()) for e in self.cuts.excess)
            self.box = 10.0 * max(max(self.cuts.costs), 1.0) / max(over, 1.0)
        self.ceiling, target = self.cuts.best_prices(self.box)
        return self.pull * self.price + (1.0 - self.pull) * target

    def update(self, price: Floats, value: float) -> None:
        """g(price) = value."""
        if value > self.value:
            self.price, self.value = price, value
        else:
            self.pull *= 0.6

    def done(self, tolerance: float) -> bool:
        """True when the box holds no better prices.  A box that holds prices back is widened."""
        if self.ceiling - self.value > tolerance:
            return False
        if self.price.max(initial=0.0) >= 0.99 * self.box > 0.0:
            self.box *= 100.0
            return False
        return True
