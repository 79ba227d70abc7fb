"""A model as arcs, the layout that the compiled searchers walk.

Every edge {a, b} becomes two arcs, 2e from a to b and 2e + 1 from b to a, each with its own matrix
(rows = labels of the tail, columns = labels of the head) and its own message (one number per label
of the head).  ``arc ^ 1`` is the way back.  The arcs out of v are
``out[out_start[v]:out_start[v + 1]]``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.nouns.problem import Ints, offsets
from autopar.searchers.gather import by_columns
from autopar.searchers.model import Floats, Model, chunks


class Arcs(NamedTuple):
    """Shapes: n variables, m edges, S labels."""

    start: Ints  # (n + 1,) labels of each variable
    out: Ints  # (2 m,) arcs by tail
    out_start: Ints  # (n + 1,)
    head: Ints  # (2 m,)
    cell_start: Ints  # (2 m,) where the arc's matrix begins
    cells: Floats  # every matrix twice, the second time by columns
    message_start: Ints  # (2 m + 1,)


def big_cost(m: Model) -> float:
    """What stands for infinity: above every finite choice, small enough to keep doubles exact."""
    unary = m.unary[np.isfinite(m.unary)]
    cells = m.edge_cost[np.isfinite(m.edge_cost)]
    return 4.0 * max(float(np.abs(unary).max(initial=1.0)), float(np.abs(cells).max(initial=1.0)))


def arcs(m: Model, big: float | None = None) -> Arcs:
    """The arcs of a model; infinite costs become ``big``, by default ``big_cost``."""
    big = big_cost(m) if big is None else big
    count = len(m.edge)
    tail, head = m.edge.ravel(), m.edge[:, ::-1].ravel()
    half = len(m.edge_cost)
    cells = np.empty(2 * half)
    np.minimum(m.edge_cost, big, out=cells[:half])
    for part in chunks(m.edge_start):
        lo, hi = half + m.edge_start[part.start], half + m.edge_start[part.stop]
        np.minimum(by_columns(m, part), big, out=cells[lo:hi])
    cell_start = np.empty(2 * count, np.int64)
    cell_start[0::2] = m.edge_start[:-1]
    cell_start[1::2] = m.edge_start[:-1] + half
    return Arcs(
        start=m.start.copy(),  # one that may not be written is another type, compiled once more
        out=np.argsort(tail, kind="stable"),
        out_start=offsets(np.bincount(tail, minlength=m.num_vars)),
        head=head,
        cell_start=cell_start,
        cells=cells,
        message_start=offsets(m.sizes[head]),
    )
