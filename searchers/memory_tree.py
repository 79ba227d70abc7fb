"""A choice together with its memory tree, for the compiled searchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from autopar.nouns.problem import Ints, offsets
from autopar.searchers.arcs import Arcs
from autopar.searchers.model import Floats, Model


class Terms(NamedTuple):
    """Memory terms sorted by variable; those of v are ``at[v]:at[v + 1]``."""

    at: Ints
    lo: Ints
    hi: Ints
    usage_at: Ints
    usage: Floats


class Memory(NamedTuple):
    """A choice and its memory tree, as the kernels take it and change it."""

    terms: Terms
    choice: Ints
    tree: Floats
    lazy: Floats
    leaves: int


def terms(m: Model) -> Terms:
    order = np.argsort(m.term_var, kind="stable")
    return Terms(
        at=offsets(np.bincount(m.term_var, minlength=m.num_vars)),
        lo=np.ascontiguousarray(m.term_rows[order, 0]),
        hi=np.ascontiguousarray(m.term_rows[order, 1]),
        usage_at=m.term_start[:-1][order],
        usage=m.term_usage,
    )


class MemoryTree:
    """A segment tree of how far each row is over its room; ``tree[1]`` is the worst."""

    def __init__(self, m: Model, choice: Ints) -> None:
        self.choice = choice
        self.terms = terms(m)
        rows = len(m.room)
        self.leaves = 1 << max(rows - 1, 0).bit_length()
        self.tree = np.full(2 * self.leaves, -np.inf if rows else -1.0)
        self.tree[self.leaves : self.leaves + rows] = m.load(choice) - m.room
        # Infinities would spoil the arithmetic of rows that do not exist.
        np.maximum(self.tree, -1e300, out=self.tree)
        for node in range(self.leaves - 1, 0, -1):
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])
        self.lazy = np.zeros(2 * self.leaves)

    @property
    def memory(self) -> Memory:
        """What the kernels take; its arrays are the tree's own."""
        return Memory(self.terms, self.choice, self.tree, self.lazy, self.leaves)

    @property
    def fits(self) -> bool:
        return bool(self.tree[1] <= 0.0)


STEPS = 5000
"""Changes that a repair may take."""
SLICE = 200
"""Changes between two looks at the clock: each looks at all variables."""


def repair(
    m: Model,
    arcs: Arcs,
    tree: MemoryTree,
    guide: Floats,
    tick: Callable[[], None] = lambda: None,
    late: Callable[[], bool] = lambda: False,
) -> bool:
    """Make the tree's choice fit, changing what costs least by ``guide``; True when it does.

    ``tick`` is called often, to end the search in time; when it is ``late``, repair gives up.
    """
    from autopar.searchers.memory_kernels import repair as compiled

    banned = np.zeros(m.num_vars, np.bool_)
    for _ in range(0, STEPS, SLICE):
        tick()
        if compiled(arcs, m.unary, guide, tree.memory, banned, SLICE) < SLICE or late():
            break
    return tree.fits and m.fits(tree.choice)
