"""One variable at a time: making a choice fit into memory, and polishing one that fits.

``make_fit`` lowers the overfull rows by the change of label that costs least per unit of excess
removed, allowing only changes that overfill nothing anew beyond what they relieve; ``polish`` then
takes each variable's best label that keeps memory within its room, until no change helps
(coordinate descent, iterated conditional modes: Besag 1986).  Plain numpy, for models of hundreds
of variables; with more than ``MANY``, the compiled kernels of ``annealing`` do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import Ints, offsets
from autopar.searchers.arcs import Arcs, arcs
from autopar.searchers.chain import BLOCK, ZERO, Chain
from autopar.searchers.memory_tree import MemoryTree, repair
from autopar.searchers.model import Floats, Model

MANY = 2_000


@lru_cache(maxsize=1)
def _layout(m: Model) -> Arcs:
    return arcs(m)


class Neighbourhood:
    """Edges and memory terms by variable, for fast conditional costs."""

    def __init__(self, m: Model) -> None:
        self.model = m
        self.near: list[list[tuple[int, Floats]]] = [[] for _ in range(m.num_vars)]
        for e, (a, b) in enumerate(m.edge.tolist()):
            matrix = m.matrix(e)
            self.near[a].append((b, matrix.T))
            self.near[b].append((a, matrix))
        order = np.argsort(m.term_var, kind="stable")
        at = offsets(np.bincount(m.term_var, minlength=m.num_vars)).tolist()
        self.terms: list[list[tuple[int, int, Floats]]] = [
            [
                (
                    int(m.term_rows[t, 0]),
                    int(m.term_rows[t, 1]),
                    m.term_usage[m.term_start[t] : m.term_start[t + 1]],
                )
                for t in order[at[v] : at[v + 1]]
            ]
            for v in range(m.num_vars)
        ]

    def costs(self, v: int, x: Ints, unary: Floats) -> Floats:
        """The cost of each label of v while its neighbours keep theirs."""
        m = self.model
        out = unary[m.start[v] : m.start[v + 1]].copy()
        for other, by_other in self.near[v]:
            out += by_other[x[other]]
        return out

    def fitting(self, v: int, x: Ints, left: Floats) -> npt.NDArray[np.bool_]:
        """Which labels of v keep every row within the room that is ``left`` now."""
        mine = x[v]
        terms = self.terms[v]
        if len(terms) == 1:
            lo, hi, usage = terms[0]
            return np.asarray(usage - usage[mine] <= max(float(left[lo:hi].min()), 0.0))
        if terms:
            change = np.zeros((int(self.model.sizes[v]), len(left)))
            for lo, hi, usage in terms:
                change[:, lo:hi] += (usage - usage[mine])[:, None]
            return np.asarray(((change <= left) | (change <= 0)).all(axis=1))
        return np.ones(self.model.sizes[v], bool)

    def move(self, v: int, label: int, x: Ints, left: Floats) -> None:
        for lo, hi, usage in self.terms[v]:
            left[lo:hi] -= usage[label] - usage[x[v]]
        x[v] = label


def make_fit(
    m: Model, x: Ints, unary: Floats, tick: Callable[[], None] = lambda: None, tries: int = 400
) -> Ints | None:
    """A choice near x within memory, or None where greedy changes find none.

    ``unary`` may hold prices on memory, which then steer what is given up.  ``tick`` is called
    often, to end the search in time.
    """
    x = x.copy()
    if not len(m.room):
        return x
    if m.num_vars > MANY:
        tree = MemoryTree(m, x)
        return x if repair(m, _layout(m), tree, np.minimum(unary, 1e250), tick) else None
    left = m.room - m.load(x)
    if (left >= 0).all():
        return x
    near = Neighbourhood(m)
    for _ in range(tries):
        row = int(left.argmin())
        if left[row] >= 0:
            return x
        tick()
        best = (np.inf, -1, -1)
        for v in np.unique(m.term_var[(m.term_rows[:, 0] <= row) & (row < m.term_rows[:, 1])]):
            relief = np.zeros(m.sizes[v])
            for lo, hi, usage in near.terms[v]:
                if lo <= row < hi:
                    relief += usage[x[v]] - usage
            useful = np.flatnonzero(relief > 0)
            if not len(useful):
                continue
            cost = near.costs(v, x, unary)
            cost = np.minimum(cost, 1e250)
            rate = (cost[useful] - cost[x[v]]) / np.minimum(relief[useful], -left[row])
            k = int(rate.argmin())
            if rate[k] < best[0]:
                best = (float(rate[k]), int(v), int(useful[k]))
        if best[1] < 0:
            return None
        near.move(best[1], best[2], x, left)
    return None


def polish(m: Model, x: Ints, sweeps: int = 20) -> Ints:
    """Coordinate descent from a choice that fits to one that no single change improves."""
    if m.num_vars > MANY:
        chain = Chain(m, _layout(m), np.zeros(len(m.room)), x, BLOCK, 0, 0)
        chain.go(m.num_vars // 10, ZERO, ZERO)
        return chain.best
    x = x.copy()
    left = m.room - m.load(x)
    near = Neighbourhood(m)
    for _ in range(sweeps):
        moved = False
        for v in range(m.num_vars):
            costs = near.costs(v, x, m.unary)
            k = int(costs.argmin())
            if costs[k] >= costs[x[v]]:
                continue
            costs[~near.fitting(v, x, left)] = np.inf
            k = int(costs.argmin())
            if costs[k] < costs[x[v]]:
                near.move(v, k, x, left)
                moved = True
        if not moved:
            break
    return x
