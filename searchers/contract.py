"""Exact contraction: variables that memory does not see are minimised away.

    degree 0   constant'      = constant + min_k unary_v(k)
    degree 1   unary'_a(i)    = unary_a(i) + min_k [ unary_v(k) + edge_va(k, i) ]
    degree 2   edge'_ab(i, j) = edge_ab(i, j) + min_k [ unary_v(k) + edge_va(k, i) + edge_vb(k, j) ]

which is bucket elimination (see ``tree_decomposition``) as far as it leaves no more cells than it
takes: degree 2 goes where a and b are neighbours already or where the new matrix is no larger than
the two that vanish.  The way back looks up the minimiser k.  A variable with a memory term stays,
for its label is not a matter of cost alone.

``settle`` goes further: a whole component of the graph without memory terms is solved by
elimination where that is narrow, and becomes part of the constant; wide ones stay.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import Ints, offsets
from autopar.searchers.gather import Lift
from autopar.searchers.model import Floats, Model, runs
from autopar.searchers.tree_decomposition import Elimination, component_cells

TABLE = 1 << 20
"""Sums compared for one variable at most; where dominance leaves fewer, its turn comes again."""
SETTLED_CELLS = 1_000_000
"""Table cells, of all of them, up to which components without memory are solved at a time."""


def contract(m: Model) -> tuple[Model, Lift] | None:
    """Contract until every variable left is seen by memory or has many neighbours."""
    graph = _Graph(m)
    steps = graph.contract()
    if not steps:
        return None
    smaller, kept = graph.rest([v for v, *_ in steps])

    def lift(x: Ints) -> Ints:
        out = np.zeros(m.num_vars, np.int64)
        out[kept] = x
        labels = out.tolist()
        for v, others, best in reversed(steps):
            labels[v] = int(best[tuple(labels[w] for w in others)])
        return np.array(labels, np.int64)

    return smaller, lift


class _Graph:
    """A model whose low-degree variables are being contracted."""

    def __init__(self, m: Model) -> None:
        self.model = m
        self.constant, self.unary = m.constant, m.unary.copy()
        self.sizes = m.sizes.tolist()
        seen = np.zeros(m.num_vars, bool)
        seen[m.term_var] = True
        self.near: dict[int, set[int]] = {v: set() for v in np.flatnonzero(~seen).tolist()}
        self.old = {(a, b): e for e, (a, b) in enumerate(m.edge.tolist())}
        self.new: dict[tuple[int, int], Floats] = {}
        for a, b in self.old:
            if a in self.near:
                self.near[a].add(b)
            if b in self.near:
                self.near[b].add(a)

    def contract(self) -> list[tuple[int, tuple[int, ...], Ints]]:
        """What went, in order: the variable, its neighbours then, its best label for theirs."""
        steps = []
        waiting = [v for v, others in self.near.items() if len(others) <= 2]
        while waiting:
            v = waiting.pop()
            if v not in self.near or len(self.near[v]) > 2:
                continue
            others = tuple(sorted(self.near[v]))
            if len(others) == 2 and not self._pays(v, *others):
                continue
            if math.prod(self.sizes[w] for w in (v, *others)) > TABLE:
                continue
            total = self.unary[self._labels(v)]
            for i, w in enumerate(others):
                matrix = self._take(v, w)
                total = total[..., None] + (matrix if i == 0 else matrix[:, None, :])
            steps.append((v, others, np.asarray(total.argmin(axis=0))))
            self._put(others, total.min(axis=0))
            del self.near[v]
            for w in others:
                if w in self.near:
                    self.near[w].discard(v)
                    self.near[w].update(u for u in others if u != w)
                    waiting.append(w)
        return steps

    def rest(self, gone: list[int]) -> tuple[Model, Ints]:
        """The model of what is left, and the numbers that its variables had."""
        m = self.model
        stays = np.array(sorted(self.old.values()), np.int64)
        size = np.diff(m.edge_start)[stays]
        cells = list(self.new.values())
        whole = replace(
            m,
            unary=self.unary,
            edge=np.concatenate([m.edge[stays], np.array(list(self.new)).reshape(-1, 2)]).astype(
                np.int64
            ),
            edge_start=offsets(np.concatenate([size, np.array([c.size for c in cells], np.int64)])),
            edge_cost=np.concatenate(
                [m.edge_cost[runs(m.edge_start[stays], size)], *[c.ravel() for c in cells]]
            ),
            constant=self.constant,
        )
        return without(whole, np.array(gone))

    def _labels(self, v: int) -> slice:
        return slice(self.model.start[v], self.model.start[v + 1])

    def _pays(self, v: int, a: int, b: int) -> bool:
        rows, columns = self.sizes[a], self.sizes[b]
        known = (a, b) in self.old or (a, b) in self.new
        return bool(known or rows * columns <= self.sizes[v] * (rows + columns))

    def _take(self, v: int, w: int) -> Floats:
        """Remove an edge; its matrix, rows = labels of v."""
        key = (min(v, w), max(v, w))
        matrix = self.new.pop(key) if key in self.new else self.model.matrix(self.old.pop(key))
        return matrix if key[0] == v else matrix.T

    def _put(self, others: tuple[int, ...], least: Floats) -> None:
        """Add what v's minimum costs its neighbours."""
        if not others:
            self.constant += float(least)
        elif len(others) == 1:
            self.unary[self._labels(others[0])] += least
        else:
            a, b = others
            known = self._take(a, b) if (a, b) in self.old or (a, b) in self.new else 0.0
            self.new[a, b] = known + least


def settle(m: Model) -> tuple[Model, Lift] | None:
    """Solve the components that have no memory terms and are narrow, narrowest first."""
    if not len(m.edge):
        return None
    root = components(m)
    coupled = np.zeros(m.num_vars, bool)
    coupled[root[m.term_var]] = True
    if coupled[root].all():
        return None
    part, at = without(m, np.flatnonzero(coupled[root]))
    narrow = _narrow(part)
    free = at[narrow]
    if not len(free) or len(free) == m.num_vars:  # the whole of a problem is for the searchers
        return None
    part, _ = without(part, np.flatnonzero(~narrow))
    part = replace(part, constant=0.0, room=m.room[:0], moment=m.moment[:0])
    value, labels = Elimination(part).minimum(part.unary)
    smaller, kept = without(m, free)

    def lift(x: Ints) -> Ints:
        out = np.zeros(m.num_vars, np.int64)
        out[kept], out[free] = x, labels
        return out

    return replace(smaller, constant=m.constant + value), lift


def _narrow(m: Model) -> npt.NDArray[np.bool_]:
    """A mask of the variables of the narrowest components, of ``SETTLED_CELLS`` together."""
    root = components(m)
    cells = component_cells(m, root, SETTLED_CELLS)
    roots = np.unique(root)
    roots = roots[np.argsort(cells[roots], kind="stable")]
    chosen = np.zeros(m.num_vars, bool)
    chosen[roots[np.cumsum(cells[roots]) <= SETTLED_CELLS]] = True
    return np.asarray(chosen[root])


def components(m: Model) -> Ints:
    """For each variable the least variable of its component of the graph, shape (n,)."""
    root = np.arange(m.num_vars)
    a, b = m.edge[:, 0], m.edge[:, 1]
    while True:
        least = np.minimum(root[a], root[b])
        before = root.copy()
        np.minimum.at(root, before[a], least)
        np.minimum.at(root, before[b], least)
        while not np.array_equal(root, root[root]):
            root = root[root]
        if np.array_equal(root, before):
            return root


def without(m: Model, gone: Ints) -> tuple[Model, Ints]:
    """The model without some variables, their edges and their memory terms.

    Second, the numbers that the variables which stay had.
    """
    stays = np.ones(m.num_vars, bool)
    stays[gone] = False
    kept = np.flatnonzero(stays)
    number = np.cumsum(stays) - 1
    edges = np.flatnonzero(stays[m.edge].all(axis=1))
    edge_size = np.diff(m.edge_start)[edges]
    terms = np.flatnonzero(stays[m.term_var])
    term_size = np.diff(m.term_start)[terms]
    smaller = replace(
        m,
        start=offsets(m.sizes[kept]),
        unary=m.unary[runs(m.start[kept], m.sizes[kept])],
        edge=number[m.edge[edges]],
        edge_start=offsets(edge_size),
        edge_cost=m.edge_cost[runs(m.edge_start[edges], edge_size)],
        term_var=number[m.term_var[terms]],
        term_rows=m.term_rows[terms],
        term_start=offsets(term_size),
        term_usage=m.term_usage[runs(m.term_start[terms], term_size)],
    )
    return smaller, kept
