"""Branch and bound over prices on memory: the search that ``elimination`` runs on a shrunk model.

Memory is priced (``memory_prices``): each elimination gives a lower bound and a choice, which is
made to fit and polished into an answer.  Where a gap remains, the problem is split on how much
memory one variable may use and both parts are searched, best bound first, until the bound meets
the answer (Lagrangian relaxation after Fisher 1981).  One evaluation is one variable eliminated.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.descent import make_fit, polish
from autopar.searchers.gather import Lift
from autopar.searchers.memory_prices import Ascent, Cuts
from autopar.searchers.model import Floats, Model, dot
from autopar.searchers.run import Run
from autopar.searchers.tree_decomposition import TABLE_LIMIT, Elimination, table_share

CELLS = 1 << 26  # of all tables together; where exact ones need more, each gets its share
MAX_BRANCHES = 2000  # parts of the problem looked at when no budget is given


@dataclass(order=True)
class Part:
    """A part of the search space: the labels with a finite ``unary``; ordered by bound."""

    bound: float
    number: int
    unary: Floats
    price: Floats


def branch_and_bound(
    run: Run,
    m: Model,
    lift: Lift,
    table_limit: int = TABLE_LIMIT,
    max_branches: int | None = None,
) -> None:
    """Search a shrunk model, offering choices and bounds to the run."""
    dp = Elimination(m, table_share(m, CELLS, table_limit), run.spend)
    root = Part(-np.inf, 0, m.unary, np.zeros(len(m.room)))
    best = [np.inf if run.cost is None else float(run.cost)]
    queue = [_examine(run, m, lift, dp, root, best)]
    numbers = 0
    while queue:
        run.bound(min(queue[0].bound, best[0]), "elimination")
        part = heapq.heappop(queue)
        if part.bound >= best[0]:
            break
        if run.closed:
            return
        if numbers >= (max_branches or numbers + 1):
            return
        if not dp.exact:
            return
        if run.budget.evaluations is None and run.budget.wall_s is None and numbers >= MAX_BRANCHES:
            run.budget_spent = True
            return
        for unary in _split(m, dp, part):
            numbers += 1
            child = _examine(run, m, lift, dp, Part(part.bound, numbers, unary, part.price), best)
            if child.bound < best[0]:
                heapq.heappush(queue, child)
    if dp.exact:
        run.bound(best[0], "elimination")


def _examine(
    run: Run, m: Model, lift: Lift, dp: Elimination, part: Part, best: list[float]
) -> Part:
    """Raise the part's bound by prices on memory, offering what is met on the way."""
    cuts = Cuts(m)
    ascent = Ascent(cuts, part.price)
    price, bound = part.price, part.bound
    no_answer_above = _largest_total(m)
    while True:
        run.spend(m.num_vars)
        value, x = dp.minimum(_with_prices(m, part.unary, price))
        value -= dot(price, m.room)
        if np.isinf(value) or value > no_answer_above:
            return Part(np.inf, part.number, part.unary, price)
        ascent.update(price, value)
        bound = max(bound, value)
        over = cuts.add(x)
        _offer(run, m, lift, x, price, best)
        if part.number == 0:
            run.bound(bound, "prices on memory")
        if bound >= best[0] or not cuts.rows or run.closed:
            break
        if (over <= 0).all() and not (price * over).any():
            break  # feasible and complementary: optimal for this part
        tolerance = 1e-6 * max(abs(bound), 1.0) if part.number == 0 else 1e-4 * abs(bound)
        price = ascent.next_prices()
        if ascent.done(max(tolerance, 0.5 if part.number == 0 else 1.0)):
            break
        if len(cuts.costs) > (200 if part.number == 0 else 8):
            break
    return Part(bound, part.number, part.unary, ascent.price)


def _with_prices(m: Model, unary: Floats, price: Floats) -> Floats:
    return np.where(np.isinf(unary), np.inf, m.priced(price))


def _largest_total(m: Model) -> float:
    """No finite choice costs more."""
    unary = np.where(np.isfinite(m.unary), m.unary, -np.inf)
    cells = np.where(np.isfinite(m.edge_cost), m.edge_cost, -np.inf)
    most = [np.array([m.constant])]
    if m.num_vars:
        most.append(np.maximum.reduceat(unary, m.start[:-1]))
    if len(m.edge):
        most.append(np.maximum.reduceat(cells, m.edge_start[:-1]))
    parts = np.concatenate(most)
    return float(parts.sum() + 1e-9 * np.abs(parts).sum()) + 1.0


def _offer(run: Run, m: Model, lift: Lift, x: Ints, price: Floats, best: list[float]) -> None:
    """Make a choice fit, polish it, and offer it."""
    fitted = make_fit(m, x, m.priced(price), run.tick)
    if fitted is None:
        return
    fitted = polish(m, fitted)
    cost = m.cost(fitted)
    if cost < best[0] and run.offer(lift(fitted), "priced elimination"):
        best[0] = cost


def _split(m: Model, dp: Elimination, part: Part) -> list[Floats]:
    """Two or more sets of labels that cover the part: by the memory of one variable.

    The variable is the one that pays most for memory at the part's prices, or uses most in the
    fullest row; its labels fall into those that use no more than its present choice and the rest.
    """
    _, x = dp.minimum(_with_prices(m, part.unary, part.price))
    row_price = part.price
    if not row_price.any():
        row_price = np.zeros(len(m.room))
        if len(m.room):
            row_price[int((m.load(x) - m.room).argmax())] = 1.0
    paid = m.priced(row_price) - m.unary
    paid[~np.isfinite(m.unary)] = 0.0
    spread, at = -1.0, -1
    for v in np.unique(m.term_var):
        labels = np.arange(m.start[v], m.start[v + 1])
        labels = labels[np.isfinite(part.unary[labels])]
        width = float(np.ptp(paid[labels])) if len(labels) else 0.0
        if len(labels) > 1 and width > spread:
            spread, at = width, int(v)
    open_var = [
        v
        for v in range(m.num_vars)
        if np.isfinite(part.unary[m.start[v] : m.start[v + 1]]).sum() > 1
    ]
    if spread <= 0:
        if not open_var:
            return []
        at = open_var[0]
    labels = np.arange(m.start[at], m.start[at + 1])
    labels = labels[np.isfinite(part.unary[labels])]
    mine = paid[m.start[at] + x[at]]
    low = labels[paid[labels] <= mine]
    if len(low) == len(labels):
        low = labels[paid[labels] < mine]
    if not len(low):
        low = labels[:1]
    out = []
    for kept in (low, np.setdiff1d(labels, low)):
        unary = part.unary.copy()
        unary[labels] = np.inf
        unary[kept] = part.unary[kept]
        out.append(unary)
    return out
