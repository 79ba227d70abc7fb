"""What the searchers begin with: the shrunk problem, a weak bound, and a first choice that fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.arcs import Arcs, arcs, big_cost
from autopar.searchers.chain import BLOCK, ZERO, Chain
from autopar.searchers.gather import Lift
from autopar.searchers.memory_tree import MemoryTree, repair
from autopar.searchers.model import Floats, Model, scatter_add
from autopar.searchers.run import Run
from autopar.searchers.shrink import Contradiction, shrink
from autopar.searchers.tree_decomposition import Elimination, table_share

LARGE = 50_000
"""Labels from which on the exact searchers look for a first answer before they begin."""

SHRINK_SHARE = 0.1
"""Of the wall clock's budget, after which shrinking begins nothing that takes long."""
GREEDY_SHARE = 0.3
"""Of the wall clock's rest, after which no further price is tried for a first answer."""
FRUGAL_CELLS = 1 << 22
"""Of all tables together in looking for the choice of least memory."""
MENDS = 40
"""Temperatures at which forbidden pairs are annealed away."""


def shrunk(run: Run) -> tuple[Model, Lift] | None:
    """The shrunk problem and the way back; None when shrinking alone ended the search."""
    try:
        m, lift = shrink(run.problem, run.report if run.progress else None, run.spent(SHRINK_SHARE))
    except Contradiction:
        run.bound(np.inf, "everything is forbidden")
        return None
    run.bound(trivial_bound(m), "cheapest strategies")
    if m.num_vars == 0:
        if not run.offer(lift(np.zeros(0, np.int64)), "shrinking"):
            run.bound(np.inf, "nothing fits")
        return None
    return m, lift


class Ready(NamedTuple):
    """A shrunk problem with a first choice that fits, and its memory."""

    model: Model
    lift: Lift
    arcs: Arcs
    tree: MemoryTree


def prepare(run: Run) -> Ready | None:
    """All of that; None when there is nothing left to search, or nothing to begin with."""
    ready = shrunk(run)
    if ready is None:
        return None
    m, lift = ready
    layout = arcs(m)
    tree = first_answer(run, m, lift, layout)
    return None if tree is None else Ready(m, lift, layout, tree)


def first_answer(run: Run, m: Model, lift: Lift, layout: Arcs | None = None) -> MemoryTree | None:
    """A choice that fits, already offered, or None where none is found.

    Greedy: variable by variable the cheapest label given the earlier ones, then repaired to fit
    into memory.  Where that ends in a forbidden pair or does not fit, memory is priced alike in all
    rows, ever higher.  Where no price helps, the choice of least memory is taken, if it fits, and
    at last what fits but for forbidden pairs is mended.
    """
    from autopar.searchers.memory_kernels import in_order

    layout = arcs(m) if layout is None else layout
    with np.errstate(invalid="ignore"):  # infinite costs, where shrinking had no time
        flat = m.priced(np.ones(len(m.room))) - m.unary
    flat[~np.isfinite(flat)] = 0.0
    finite = m.unary[np.isfinite(m.unary)]
    unit = float(np.abs(finite).max(initial=1.0)) / max(float(flat.max(initial=0.0)), 1.0)
    frugal = MemoryTree(m, _least(m, flat))
    fitting = [frugal] if frugal.fits else []
    late = run.spent(GREEDY_SHARE)
    for price in (0.0, 0.01, 0.1, 1.0, 10.0, 1e4):
        if late():
            break
        guide = m.unary + price * unit * flat
        tree = MemoryTree(m, in_order(layout, guide))
        if repair(m, layout, tree, guide, run.tick, late):
            if np.isfinite(m.cost(tree.choice)):
                run.offer(lift(tree.choice), "greedy")
                return _polished(run, m, lift, layout, tree.choice)
            fitting.append(tree)
        run.spend(m.num_vars)
    x = least_memory(run, m)
    if np.isfinite(m.cost(x)) and m.fits(x):
        run.offer(lift(x), "least memory")
        return _polished(run, m, lift, layout, x)
    for tree in reversed(fitting):
        mended = _mend(run, m, layout, tree.choice)
        if mended is not None:
            run.offer(lift(mended), "mended")
            return _polished(run, m, lift, layout, mended)
    return None


def _polished(run: Run, m: Model, lift: Lift, layout: Arcs, x: Ints) -> MemoryTree:
    """What a few blocks at temperature zero make of a choice; every variable sees several."""
    chain = Chain(m, layout, np.zeros(len(m.room)), x, BLOCK, 0, 0)
    looked = chain.go(max(m.num_vars // 10, 1), ZERO, ZERO)
    run.offer(lift(chain.best), "polished")
    run.spend(looked)
    return MemoryTree(m, chain.best)


def least_memory(run: Run, m: Model) -> Ints:
    """The choice of the least sum of usages without a forbidden pair, where the graph is narrow.

    Elsewhere a choice of little memory, which may have forbidden pairs.
    """
    usage = scatter_add(m.term_label, m.term_usage, len(m.unary))
    frugal = replace(
        m,
        unary=np.where(np.isfinite(m.unary), usage, np.inf),
        edge_cost=np.where(np.isfinite(m.edge_cost), 0.0, np.inf),
    )
    dp = Elimination(frugal, table_share(frugal, FRUGAL_CELLS), run.spend)
    return dp.minimum(frugal.unary)[1]


def _least(m: Model, weight: Floats) -> Ints:
    """Every variable's label of the least weight, among those allowed."""
    weight = np.where(np.isfinite(m.unary), weight, np.inf)
    owner = np.repeat(np.arange(m.num_vars), m.sizes)
    return np.asarray(np.lexsort((weight, owner))[m.start[:-1]] - m.start[:-1])


def _mend(run: Run, m: Model, layout: Arcs, x: Ints) -> Ints | None:
    """Anneal away the forbidden pairs of a choice that fits, each counted as a large cost."""
    big = big_cost(m)
    soft = replace(m, unary=np.minimum(m.unary, big), edge_cost=np.minimum(m.edge_cost, big))
    chain = Chain(soft, layout, np.zeros(len(m.room)), x, BLOCK, 0, 0)
    heats = big * np.geomspace(0.3, 1e-3, MENDS + 1)
    for hot, cold in pairwise(heats):
        run.spend(chain.go(max(m.num_vars // 10, 10), float(hot), float(cold)))
        if np.isfinite(m.cost(chain.best)):
            return chain.best
    return None


def trivial_bound(m: Model) -> float:
    """Every variable's and every edge's least cost: weak, but at once."""
    total = float(m.constant)
    if m.num_vars:
        total += float(np.minimum.reduceat(m.unary, m.start[:-1]).sum())
    if len(m.edge):
        total += float(np.minimum.reduceat(m.edge_cost, m.edge_start[:-1]).sum())
    return total
