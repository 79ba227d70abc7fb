"""Compiled bookkeeping of memory: a segment tree over rows, changes of label, greedy choices.

The tree holds, for every row, the memory used beyond its room; the largest is ``tree[1]``, so a
choice fits when that is not above zero.  Imported only when a model is large.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"
from __future__ import annotations

import numba
import numpy as np

jit = numba.njit(cache=True, nogil=True, fastmath={"nsz", "contract", "nnan", "ninf"})


@jit
def add_range(tree, lazy, leaves, lo, hi, value):
    """Add to rows lo:hi of a segment tree whose root, ``tree[1]``, is the largest row."""
    left = lo + leaves
    right = hi + leaves
    first = left
    last = right - 1
    while left < right:
        if left & 1:
            tree[left] += value
            lazy[left] += value
            left += 1
        if right & 1:
            right -= 1
            tree[right] += value
            lazy[right] += value
        left >>= 1
        right >>= 1
    first >>= 1
    last >>= 1
    while first > 0:
        tree[first] = max(tree[2 * first], tree[2 * first + 1]) + lazy[first]
        if last != first:
            tree[last] = max(tree[2 * last], tree[2 * last + 1]) + lazy[last]
        first >>= 1
        last >>= 1


@jit
def change_label(arcs, unary, memory, v, label):
    """Give v another label; keeps the memory tree right and returns the change of cost."""
    start, out, out_start, head, cell_start, cells = arcs[:6]
    terms, x, tree, lazy, leaves = memory
    old = x[v]
    size = start[v + 1] - start[v]
    delta = unary[start[v] + label] - unary[start[v] + old]
    for s in range(out_start[v], out_start[v + 1]):
        arc = out[s]
        at = cell_start[arc ^ 1] + x[head[arc]] * size
        delta += cells[at + label] - cells[at + old]
    term_at, term_lo, term_hi, usage_at, usage = terms
    for t in range(term_at[v], term_at[v + 1]):
        grown = usage[usage_at[t] + label] - usage[usage_at[t] + old]
        if grown != 0.0:
            add_range(tree, lazy, leaves, term_lo[t], term_hi[t], grown)
    x[v] = label
    return delta


@jit
def in_order(arcs, unary):
    """Variable by variable the cheapest label, given the earlier ones, whatever the memory."""
    start, out, out_start, head, cell_start, cells = arcs[:6]
    n = len(start) - 1
    x = np.zeros(n, np.int64)
    score = unary.copy()
    for v in range(n):
        lo = start[v]
        size = start[v + 1] - lo
        for s in range(out_start[v], out_start[v + 1]):
            arc = out[s]
            w = head[arc]
            width = start[w + 1] - start[w]
            if w < v:
                at = cell_start[arc ^ 1] + x[w] * size
                for k in range(size):
                    score[lo + k] += cells[at + k]
            else:
                at = cell_start[arc]
                for k in range(size):
                    least = cells[at]
                    for j in range(1, width):
                        least = min(least, cells[at + j])
                    score[lo + k] += least
                    at += width
        x[v] = np.argmin(score[lo : lo + size])
    return x


@jit
def most_labels(start):
    """Of any variable."""
    most = 0
    for v in range(len(start) - 1):
        most = max(most, start[v + 1] - start[v])
    return most


@jit
def fullest_row(tree, leaves):
    """The row that has most above its room."""
    node = 1
    while node < leaves:
        node *= 2
        if tree[node + 1] > tree[node]:
            node += 1
    return node - leaves


@jit
def relieves(terms, x, v, row, relief):
    """What each label of v uses less of a row than its own, in ``relief``; whether any does."""
    term_at, term_lo, term_hi, usage_at, usage = terms
    relief[:] = 0.0
    for t in range(term_at[v], term_at[v + 1]):
        if term_lo[t] <= row and row < term_hi[t]:
            mine = usage[usage_at[t] + x[v]]
            for k in range(len(relief)):
                relief[k] += mine - usage[usage_at[t] + k]
    useful = False
    for k in range(len(relief)):
        useful = useful or relief[k] > 0.0
    return useful


@jit
def repair(arcs, unary, guide, memory, banned, max_steps):
    """Relieve the fullest row, again and again, by the change that costs least per unit relieved.

    A change counts what ``guide`` says, at least zero.  Changes that make the fullest row fuller
    than it was are taken back, and their variable is ``banned``, also for the next call.  Returns
    the steps taken; fewer than ``max_steps`` when there is nothing more to do.  The choice fits
    afterwards exactly if ``tree[1] <= 0``.
    """
    start, out, out_start, head, cell_start, cells = arcs[:6]
    terms, x, tree, _, leaves = memory
    n = len(start) - 1
    score = np.empty(most_labels(start))
    every = np.empty(len(score))
    for step in range(max_steps):
        worst = tree[1]
        if worst <= 0.0:
            return step
        row = fullest_row(tree, leaves)
        best_rate = 1e300
        best_v = np.int64(-1)  # a plain -1 is a type of its own, compiled for once more
        best_label = np.int64(-1)
        for v in range(n):
            if banned[v]:
                continue
            size = start[v + 1] - start[v]
            relief = every[:size]
            if not relieves(terms, x, v, row, relief):
                continue
            for k in range(size):
                score[k] = guide[start[v] + k]
            for s in range(out_start[v], out_start[v + 1]):
                arc = out[s]
                at = cell_start[arc ^ 1] + x[head[arc]] * size
                for k in range(size):
                    score[k] += cells[at + k]
            for k in range(size):
                if relief[k] > 0.0:
                    rate = max(score[k] - score[x[v]], 0.0) / min(relief[k], worst)
                    if rate < best_rate:
                        best_rate = rate
                        best_v = v
                        best_label = k
        if best_v < 0:
            return step
        old = x[best_v]
        change_label(arcs, unary, memory, best_v, best_label)
        if tree[1] > worst:
            change_label(arcs, unary, memory, best_v, old)
            banned[best_v] = True
    return max_steps
