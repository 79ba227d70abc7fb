"""Exact contraction: variables that memory does not see are minimised away.

    degree 0   constant'      = constant + min_k unary_v(k)
    degree 1   unary'_a(i)    = unary_a(i) + min_k [ unary_v(k) + edge_va(k, i) ]
    degree 2   edge'_ab(i, j) = edge_ab(i, j) + min_k [ unary_v(k) + edge_va(k, i) + edge_vb(k, j) ]

which is bucket elimination (see ``tree_decomposition``) as far as it leaves no more cells than it
takes: degree 2 goes where a and b are neighbours already or where the new matrix is no larger than
the two that vanish.  The way back looks up the minimiser k.  A variable with a memory term stays,
for its label is not a matter of cost alone.

``settle`` goes further: a whole component of the graph without memory terms is solved by
elimination where that is narrow, and becomes part of the constant.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import Ints, offsets
from autopar.searchers.gather import Lift
from autopar.searchers.model import Floats, Model, runs, unique_edges
from autopar.searchers.tree_decomposition import Elimination, elimination_cells

SETTLED_CELLS = 1_000_000
"""Table cells up to which components without memory are solved."""

Mask = npt.NDArray[np.bool_]


def contract(m: Model) -> tuple[Model, Lift] | None:
    """One round: variables of degree at most two, no two of them neighbours."""
    picked = _independent(m)
    if not len(picked):
        return None
    number = np.full(m.num_vars, -1)
    number[picked] = np.arange(len(picked))
    ends = number[m.edge]
    near: list[list[tuple[int, Floats]]] = [[] for _ in picked]
    for e in np.flatnonzero((ends >= 0).any(axis=1)).tolist():
        a, b = m.edge[e].tolist()
        v, other, matrix = (a, b, m.matrix(e)) if ends[e, 0] >= 0 else (b, a, m.matrix(e).T)
        near[number[v]].append((other, matrix))

    constant = m.constant
    unary = m.unary.copy()
    pairs: list[tuple[int, int]] = []
    cells: list[Floats] = []
    # The minimisers of each picked variable, one for every pair of labels of its neighbours.
    tables: list[Ints] = []
    left, right, width = (np.zeros(len(picked), np.int64) for _ in range(3))
    for i, v in enumerate(picked.tolist()):
        total = m.unary[m.start[v] : m.start[v + 1]]
        for other, matrix in near[i][:1]:
            left[i] = other
            total = total[:, None] + matrix
        for other, matrix in near[i][1:]:
            right[i], width[i] = other, matrix.shape[1]
            total = total[:, :, None] + matrix[:, None, :]
        tables.append(total.argmin(axis=0).ravel())
        least = total.min(axis=0)
        if least.ndim == 0:
            constant += float(least)
        elif least.ndim == 1:
            unary[m.start[left[i]] : m.start[left[i] + 1]] += least
        else:
            pairs.append((int(left[i]), int(right[i])))
            cells.append(least.ravel())

    stays = np.flatnonzero((ends < 0).all(axis=1))
    size = np.diff(m.edge_start)[stays]
    edge, edge_start, edge_cost = unique_edges(
        m.sizes,
        np.concatenate([m.edge[stays], np.array(pairs, np.int64).reshape(-1, 2)]),
        offsets(np.concatenate([size, np.array([len(c) for c in cells], np.int64)])),
        np.concatenate([m.edge_cost[runs(m.edge_start[stays], size)], *cells]),
    )
    whole = replace(
        m, unary=unary, edge=edge, edge_start=edge_start, edge_cost=edge_cost, constant=constant
    )
    smaller, kept = without(whole, picked)
    table = np.concatenate(tables)
    table_start = offsets(np.array([len(t) for t in tables], np.int64))[:-1]
    degree = np.array([len(others) for others in near])
    # Where an entry lies: degree 0 has one, degree 1 one per label, degree 2 rows of a's labels.
    step = np.choose(degree, [0, 1, width])

    def lift(x: Ints) -> Ints:
        out = np.zeros(m.num_vars, np.int64)
        out[kept] = x
        out[picked] = table[table_start + out[left] * step + out[right] * (degree == 2)]
        return out

    return smaller, lift


def settle(m: Model) -> tuple[Model, Lift] | None:
    """Solve the components that have no memory terms, as far as they are narrow."""
    if not len(m.edge):
        return None
    root = components(m)
    coupled = np.zeros(m.num_vars, bool)
    coupled[root[m.term_var]] = True
    free = np.flatnonzero(~coupled[root])
    if not len(free) or len(free) == m.num_vars:  # the whole of a problem is for the searchers
        return None
    part, _ = without(m, np.flatnonzero(coupled[root]))
    if elimination_cells(part, SETTLED_CELLS) > SETTLED_CELLS:
        return None
    part = replace(part, constant=0.0, room=m.room[:0], moment=m.moment[:0])
    value, found = Elimination(part).minimum(part.unary)
    smaller, kept = without(m, free)

    def lift(x: Ints) -> Ints:
        out = np.zeros(m.num_vars, np.int64)
        out[kept], out[free] = x, found
        return out

    return replace(smaller, constant=m.constant + value), lift


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


def _independent(m: Model) -> Ints:
    """Variables to contract in one round."""
    degree = np.bincount(m.edge.ravel(), minlength=m.num_vars)
    wanted = degree <= 2
    wanted[m.term_var] = False
    if not wanted.any():
        return np.zeros(0, np.int64)
    near: dict[int, list[int]] = {v: [] for v in np.flatnonzero(wanted).tolist()}
    touched = m.edge[wanted[m.edge].any(axis=1)].tolist()
    for a, b in touched:
        if a in near:
            near[a].append(b)
        if b in near:
            near[b].append(a)
    joined = {(a, b) for a, b in m.edge.tolist()} if len(touched) else set()
    taken: set[int] = set()
    out = []
    for v, others in near.items():
        if v in taken or not taken.isdisjoint(others):
            continue
        if len(others) == 2:
            a, b = sorted(others)
            rows, columns, own = (int(m.sizes[w]) for w in (a, b, v))
            if (a, b) not in joined and rows * columns > own * (rows + columns):
                continue
        taken.add(v)
        out.append(v)
    return np.array(out, np.int64)
