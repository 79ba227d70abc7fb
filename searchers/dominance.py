"""Which labels are dominated: never better than another label of their variable, whatever the rest.

    k dominates l  iff  unary(k) - unary(l) + sum_{e at v} max_j [ e(k, j) - e(l, j) ] <= 0
                        and usage_t(k) <= usage_t(l) for every memory term t of v

where a pair of infinite cells counts as equal.  Of labels that dominate each other the first stays.
Removing all dominated labels of all variables at once is right only when ties across variables
cannot conspire, so each variable's test sees the labels removed before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import offsets
from autopar.searchers.model import Floats, Model

SAMPLE = 4  # columns looked at before a pair of labels is compared in full
CHUNK = 1 << 20  # cells compared at a time


def dominated(m: Model) -> npt.NDArray[np.bool_]:
    """A mask over labels; variable by variable, in pure numpy."""
    gone = np.zeros(m.start[-1], bool)
    slots, at = _incidence(m)
    terms = np.argsort(m.term_var, kind="stable")
    term_at = offsets(np.bincount(m.term_var, minlength=m.num_vars))
    for v in range(m.num_vars):
        size = int(m.sizes[v])
        if size == 1:
            continue
        lo, hi = m.start[v], m.start[v + 1]
        blocks: list[Floats] = []
        for e in slots[at[v] : at[v + 1]]:
            a, b = m.edge[e]
            matrix = m.matrix(e)
            lines, other = (matrix, b) if a == v else (matrix.T, a)
            kept = ~gone[m.start[other] : m.start[other + 1]]
            blocks.append(lines if kept.all() else lines[:, kept])
        usage = [
            m.term_usage[m.term_start[t] : m.term_start[t + 1]]
            for t in terms[term_at[v] : term_at[v + 1]]
        ]
        with np.errstate(invalid="ignore"):  # inf - inf: not a number, see `_excess`
            gone[lo:hi] = _dominated_labels(m.unary[lo:hi], blocks, usage)
    return gone


def _incidence(m: Model) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Edges of each variable: numbers, and where each variable's begin."""
    ends = m.edge.ravel()
    order = np.argsort(ends, kind="stable")
    return order // 2, offsets(np.bincount(ends, minlength=m.num_vars))


def _dominated_labels(
    unary: Floats, blocks: list[Floats], usage: list[Floats]
) -> npt.NDArray[np.bool_]:
    """For one variable; blocks have one line per label."""
    size = len(unary)
    # worst[k, l]: by how much k can be worse than l.
    worst = _excess(unary[:, None, None], unary[None, :, None])
    for used in usage:
        worst[used[:, None] > used[None, :]] = np.inf
    # max_j is at least its value on a few columns; that settles most pairs cheaply.
    at_least = worst.copy()
    for lines in blocks:
        few = lines[:, :: -(-lines.shape[1] // SAMPLE)]
        at_least += _excess(few[:, None, :], few[None, :, :])  # -inf + inf is not <= 0
    rival, mine = np.nonzero(at_least <= 0)
    rival, mine = rival[rival != mine], mine[rival != mine]
    total = worst[rival, mine]
    for lines in blocks:
        step = max(1, CHUNK // lines.shape[1])
        for lo in range(0, len(rival), step):
            part = slice(lo, lo + step)
            total[part] += _excess(lines[rival[part]], lines[mine[part]])
    worst = np.full((size, size), np.inf)
    worst[rival, mine] = total
    better = worst <= 0
    # Of a tie the first stays: l goes when k beats it and (k is first or l does not beat k back).
    first = np.tri(size, k=-1, dtype=bool).T
    return np.asarray((better & (first | ~better.T)).any(axis=0))


def _excess(mine: Floats, other: Floats) -> Floats:
    """max_j [mine - other] over the last axis; where other is infinite there is nothing to lose."""
    change = mine - other
    change[np.isnan(change)] = -np.inf
    out: Floats = change.max(axis=-1)
    return out
