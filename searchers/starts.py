"""A first choice that fits, for the searchers that only improve on one."""

from __future__ import annotations

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.arcs import Arcs
from autopar.searchers.memory_tree import MemoryTree, repair
from autopar.searchers.model import Floats, Model


def greedy_start(m: Model, arcs: Arcs) -> MemoryTree | None:
    """Variable by variable the cheapest label given the earlier ones, then repaired.

    Where repair fails, memory is priced alike in all rows, ever higher.
    """
    flat = m.priced(np.ones(len(m.room))) - m.unary
    flat[~np.isfinite(flat)] = 0.0
    finite = m.unary[np.isfinite(m.unary)]
    unit = float(np.abs(finite).max(initial=1.0)) / max(float(flat.max(initial=0.0)), 1.0)
    for price in (0.0, 0.01, 0.1, 1.0, 10.0, 1e4):
        guide = m.unary + price * unit * flat
        tree = MemoryTree(m, _in_order(m, arcs, guide))
        if repair(m, arcs, tree, guide) and np.isfinite(m.cost(tree.choice)):
            return tree
    return None


def _in_order(m: Model, arcs: Arcs, unary: Floats) -> Ints:
    x = np.zeros(m.num_vars, np.int64)
    for v in range(m.num_vars):
        score = unary[m.start[v] : m.start[v + 1]].copy()
        for arc in arcs.out[arcs.out_start[v] : arcs.out_start[v + 1]]:
            w = arcs.head[arc]
            at = arcs.cell_start[arc]
            width = int(m.sizes[w])
            cells = arcs.cells[at : at + width * len(score)].reshape(len(score), width)
            score += cells[:, x[w]] if w < v else cells.min(axis=1)
        x[v] = int(score.argmin())
    return x
