"""Exact shrinking: a smaller model with the same optimum, and the way back.

Every step returns ``(smaller model, lift)``; a lifted choice has the same cost and memory, and at
least one optimal choice survives every step.  Steps repeat until none removes anything.

- ``drop_hopeless``: a label goes when its unary cost is infinite or when, on some edge, it has no
  finite partner left (arc consistency, Mackworth 1977).
- ``merge_forced``: where every label of two neighbours has exactly one partner on the other side,
  choosing one chooses the other, and the two become one variable.
- ``absorb_fixed``: a variable with one label left is added to its neighbours and disappears.
- ``drop_dominated``: label l goes when some other label k of the variable is never worse,
  unary(k) - unary(l) + sum_e max_j [e(k, j) - e(l, j)] <= 0, and uses no more memory in any row
  (dead-end elimination, Desmet et al. 1992, in the form of Goldstein 1994).
- ``contract`` and ``settle`` (see ``contract``): variables of low degree and whole components that
  memory does not see are minimised away.
- ``tidy_memory`` (see ``gather``): rows and terms that cannot matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.nouns.problem import Ints, Problem, offsets
from autopar.searchers.contract import contract, settle, without
from autopar.searchers.gather import Lift, by_columns, gather, keep_labels, tidy_memory
from autopar.searchers.model import Floats, Model, chunks, from_problem, runs

Say = Callable[[str], None]

LARGE = 20_000  # labels from which on a round must remove 5 % to be repeated


class Contradiction(Exception):
    """Every choice is forbidden."""


def shrink(
    problem: Problem, say: Say | None = None, enough: Callable[[], bool] = lambda: False
) -> tuple[Model, Lift]:
    """The smallest equivalent model that the steps reach.

    The lift turns a choice for it into a choice for ``problem``.  From when ``enough`` says so, no
    round is begun, nor the step that takes longest.  Raises Contradiction when what the costs
    forbid leaves no choice at all.
    """
    return shrink_model(from_problem(problem), say, enough)


def shrink_model(
    model: Model, say: Say | None = None, enough: Callable[[], bool] = lambda: False
) -> tuple[Model, Lift]:
    """The same for a model."""
    tidied = tidy_memory(model)
    if say is not None and _size(tidied) != _size(model):
        say(f"tidy_memory: {_size(model)} -> {_size(tidied)}")
    model = tidied
    lifts: list[Lift] = []
    steps = (drop_hopeless, merge_forced, absorb_fixed, contract, settle, drop_dominated)
    worth_it = True
    while worth_it:
        labels = model.start[-1]
        for step in steps:
            if step is drop_dominated and enough():
                continue
            result = step(model)
            if result is None:
                continue
            smaller, lift = result
            smaller = tidy_memory(smaller)
            lifts.append(lift)
            if say is not None:
                say(f"{step.__name__}: {_size(model)} -> {_size(smaller)}")
            model = smaller
        # Another round costs as much as this one; a large model needs a reason for it.
        worth_it = model.start[-1] < (labels if labels < LARGE else 0.95 * labels) and not enough()
    # Labels removed last may have left single ones.
    while (result := absorb_fixed(model)) is not None:
        lifts.append(result[1])
        model = tidy_memory(result[0])
    return model, _chain(lifts)


def _size(m: Model) -> str:
    return (
        f"{m.num_vars} variables, {m.start[-1]} labels, {len(m.edge)} edges, "
        f"{len(m.term_var)} memory terms in {len(m.room)} rows"
    )


def _chain(lifts: list[Lift]) -> Lift:
    def lift(x: Ints) -> Ints:
        for step in reversed(lifts):
            x = step(x)
        return x

    return lift


def _line_minima(m: Model) -> tuple[Floats, Floats, Ints, Ints]:
    """Cheapest cell of every matrix row and column, and the label that each belongs to."""
    rows, columns = m.sizes[m.edge[:, 0]], m.sizes[m.edge[:, 1]]
    row_label = runs(m.start[m.edge[:, 0]], rows)
    column_label = runs(m.start[m.edge[:, 1]], columns)
    if not len(m.edge):
        return np.zeros(0), np.zeros(0), row_label, column_label
    row_min = np.minimum.reduceat(m.edge_cost, offsets(np.repeat(columns, rows))[:-1])
    # Columns: the same on transposed cells.
    column_min = [
        np.minimum.reduceat(by_columns(m, part), offsets(np.repeat(rows[part], columns[part]))[:-1])
        for part in chunks(m.edge_start)
    ]
    return row_min, np.concatenate(column_min), row_label, column_label


def drop_hopeless(m: Model) -> tuple[Model, Lift] | None:
    """Remove labels that no finite choice contains."""
    row_min, column_min, row_label, column_label = _line_minima(m)
    keep = np.isfinite(m.unary)
    keep[row_label[np.isinf(row_min)]] = False
    keep[column_label[np.isinf(column_min)]] = False
    # A label whose use alone overfills a row can never be chosen.
    if len(m.room) and len(m.term_var):
        tightest = _range_minimum(m.room, m.term_rows)
        over = m.term_usage > np.repeat(tightest, np.diff(m.term_start))
        keep[m.term_label[over]] = False
    if keep.all():
        return None
    left = np.add.reduceat(keep, m.start[:-1])
    if (left == 0).any():
        raise Contradiction
    return keep_labels(m, keep)


def _range_minimum(values: Floats, ranges: Ints) -> Floats:
    """min(values[lo:hi]) for many non-empty ranges, by a sparse table."""
    table = [values]
    while 2 ** len(table) <= len(values):
        half, last = 2 ** (len(table) - 1), table[-1]
        table.append(np.minimum(last[:-half], last[half:]))
    length = ranges[:, 1] - ranges[:, 0]
    level = np.frexp(length.astype(np.float64))[1] - 1
    out = np.empty(len(ranges))
    for k, row in enumerate(table):
        at = np.flatnonzero(level == k)
        out[at] = np.minimum(row[ranges[at, 0]], row[ranges[at, 1] - 2**k])
    return out


def merge_forced(m: Model) -> tuple[Model, Lift] | None:
    """Merge along every edge that pairs the labels of its ends one to one."""
    finite = np.isfinite(m.edge_cost)
    rows, columns = m.sizes[m.edge[:, 0]], m.sizes[m.edge[:, 1]]
    if not len(m.edge):
        return None
    count = np.add.reduceat(finite, m.edge_start[:-1], dtype=np.int64)
    candidates = np.flatnonzero((rows == columns) & (count == rows))
    # After drop_hopeless each line has a finite cell, so as many cells as lines is one each.
    partners: dict[int, list[tuple[int, Ints]]] = {}
    for e in candidates.tolist():
        a, b = m.edge[e].tolist()
        row, column = np.nonzero(np.isfinite(m.matrix(e)))
        if len(np.unique(row)) < rows[e] or len(np.unique(column)) < rows[e]:
            continue
        partners.setdefault(a, []).append((b, column))
        partners.setdefault(b, []).append((a, np.argsort(column)))
    if not partners:
        return None
    root = np.arange(m.num_vars)
    seen = np.zeros(m.num_vars, bool)
    source = [np.arange(k) for k in m.sizes]
    for v in partners:
        if seen[v]:
            continue
        seen[v] = True
        stack = [v]
        while stack:
            a = stack.pop()
            for b, b_of_a in partners[a]:
                if not seen[b]:
                    seen[b] = True
                    root[b] = v
                    source[b] = b_of_a[source[a]]
                    stack.append(b)
    roots, var_of = np.unique(root, return_inverse=True)
    return gather(m, var_of, np.concatenate(source), m.sizes[roots])


def absorb_fixed(m: Model) -> tuple[Model, Lift] | None:
    """Remove the variables that have one label left.

    Their memory terms, constant as they are, must have been moved into room (``tidy_memory``).
    """
    fixed = m.sizes == 1
    if not fixed.any():
        return None
    unary = m.unary.copy()
    side = fixed[m.edge]
    constant = m.constant + unary[m.start[:-1][fixed]].sum()
    both = np.flatnonzero(side.all(axis=1))
    constant += m.edge_cost[m.edge_start[both]].sum()
    # With one line only, a matrix is the vector of its other end, whichever way it lies.
    for end in (0, 1):
        e = np.flatnonzero(side[:, 1 - end] & ~side[:, end])
        size = m.sizes[m.edge[e, end]]
        label = runs(m.start[m.edge[e, end]], size)
        unary += np.bincount(label, m.edge_cost[runs(m.edge_start[e], size)], len(unary))
    smaller, free = without(replace(m, unary=unary, constant=float(constant)), fixed.nonzero()[0])

    def lift(x: Ints) -> Ints:
        out = np.zeros(len(fixed), np.int64)
        out[free] = x
        return out

    return smaller, lift


def drop_dominated(m: Model) -> tuple[Model, Lift] | None:
    """Remove labels that another label of the same variable is never worse than."""
    from autopar.searchers.dominance import dominated

    gone = dominated(m)
    if not gone.any():
        return None
    return keep_labels(m, ~gone)
