"""The default: looks at the shape of the problem and chains the other searchers.

1. Shrink.  A narrow graph (small tables in ``tree_decomposition``) goes to ``elimination``, which
   usually ends there.
2. A small rest goes to ``integer_program``, which proves the optimum.
3. Otherwise the dual (``trws``) gives a bound, prices on memory and a start; labels whose reduced
   cost rules them out go, the model shrinks again, and what has become small is solved as an
   integer program.
4. What stays large is annealed in rounds.  Between rounds the answers of the chains are merged:
   the model restricted to the labels that some chain chose, and to those of small reduced cost,
   is small enough for the integer program (solution merging, after Blum et al. 2016).
"""

from __future__ import annotations

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers import integer_program
from autopar.searchers.annealing import improve
from autopar.searchers.arcs import Arcs
from autopar.searchers.branch_and_bound import branch_and_bound
from autopar.searchers.gather import Lift, composed, keep_labels
from autopar.searchers.memory_tree import MemoryTree, repair
from autopar.searchers.merging import CORE, Merge
from autopar.searchers.model import Model
from autopar.searchers.run import Run
from autopar.searchers.shrink import Contradiction, shrink_model
from autopar.searchers.starts import LARGE, SHRINK_SHARE, first_answer, shrunk
from autopar.searchers.tree_decomposition import elimination_cells
from autopar.searchers.trws import Dual

NARROW = 2_000_000  # table cells of one elimination up to which it is tried
BRANCHES = 2  # parts that elimination may look at before the integer program takes over
SMALL = 10_000  # edge cells up to which the integer program is tried at once
PASSES = 1500  # of the dual before a look at what it rules out
NEAR = 0.05  # relative gap below which merging is tried before anything else
RULE_OUTS = 3  # times that the dual starts again on what it left


def search(run: Run, seed: int) -> None:
    """See the module."""
    ready = shrunk(run)
    if ready is not None:
        _solve(run, *ready, seed)


def _solve(run: Run, m: Model, lift: Lift, seed: int) -> None:
    known: Ints | None = None
    shrinking_s = run.wall_s
    if m.start[-1] > LARGE:
        known = _first(run, m, lift)
    if elimination_cells(m, NARROW) <= NARROW:
        branch_and_bound(run, m, lift, max_branches=BRANCHES)
        if run.closed:
            return
    if len(m.edge_cost) <= SMALL:
        if integer_program.solve(run, m, lift, limit_s=run.share_s(0.6), seed=seed):
            return
    dual, before = Dual(m, run, lift), None
    if run.cost is None:
        known = _first(run, m, lift, dual.arcs)
    for turn in range(RULE_OUTS + 1):
        share = 0.25 if turn < RULE_OUTS else 0.1
        dual.ascend(PASSES, run.wall_s + run.share_s(share), share * run.remaining_evaluations)
        if run.closed:
            return
        start = dual.choice if dual.choice is not None else first_fit(dual)
        if start is None:
            start, known = known, None
        if start is None:
            break
        merge = Merge(run, dual, lift, seed, shrinking_s)
        before = (dual, merge, start, lift)
        if turn == RULE_OUTS or run.remaining_s < 2.0 * shrinking_s:
            break
        if run.cost is not None and dual.gap <= NEAR * abs(run.cost):
            merge.solve([start], start)
            if run.remaining_s < 2.0 * shrinking_s:
                break
        smaller = _rule_out(run, dual)
        if smaller is None:
            return
        m, back = smaller
        lift = composed(lift, back)
        known = None
        if m.num_vars == 0:  # one choice is left that might be better than the answer
            run.offer(lift(np.zeros(0, np.int64)), "ruling out")
            run.bound(float(run.cost or 0.0), "nothing else is left")
            return
        if len(m.edge_cost) <= CORE and integer_program.solve(
            run, m, lift, dual.busy_rows(m), limit_s=run.share_s(0.25), seed=seed
        ):
            return
        if m.start[-1] > 0.95 * dual.model.start[-1]:
            break
        dual = Dual(m, run, lift, dual)
    if before is None:
        integer_program.solve(run, m, lift, dual.busy_rows(m), seed=seed)
        return
    dual, merge, start, lift = before
    if merge.best is not None and dual.model.cost(merge.best) < dual.model.cost(start):
        start = merge.best
    improve(run, dual.model, lift, dual.arcs, dual.price, start, seed, merge)


def _first(run: Run, m: Model, lift: Lift, layout: Arcs | None = None) -> Ints | None:
    tree = first_answer(run, m, lift, layout)
    return None if tree is None else tree.choice


def _rule_out(run: Run, dual: Dual) -> tuple[Model, Lift] | None:
    """The dual's model without the labels that cannot be part of a better answer, shrunk.

    None when that leaves nothing: the answer known is optimal.
    """
    assert run.cost is not None
    # Not less the gap that was asked for: what is found in the rest must bound the whole.
    keep = dual.open_labels(min(dual.upper, run.cost))
    try:
        if (np.add.reduceat(keep, dual.model.start[:-1]) == 0).any():
            raise Contradiction
        fewer, back = keep_labels(dual.model, keep)
        smaller, further = shrink_model(fewer, enough=run.spent(SHRINK_SHARE))
    except Contradiction:
        run.bound(float(run.cost), "nothing better is left")
        return None
    run.report(f"ruled out: {len(keep)} -> {keep.sum()} -> {smaller.start[-1]} labels")
    return smaller, composed(back, further)


def first_fit(dual: Dual) -> Ints | None:
    """A choice that fits, from labels of ever higher prices on memory; None if none is found."""
    m = dual.model
    for factor in (1.0, 2.0, 4.0, 16.0, 256.0):
        for price in (dual.price, np.full(len(m.room), dual.price.max(initial=1.0))):
            x = dual.decode(factor * price)
            tree = MemoryTree(m, x)
            fits = repair(m, dual.arcs, tree, m.priced(price), dual.run.tick)
            if fits and np.isfinite(m.cost(tree.choice)):
                dual.run.offer(dual.lift(tree.choice), "repair")
                return tree.choice
    return None
