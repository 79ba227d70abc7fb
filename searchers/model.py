"""A sharding problem as the searchers compute with it: doubles, unique edges, memory rows.

    minimise    constant + sum_v unary_v(x_v) + sum_{a<b} edge_ab(x_a, x_b)
    subject to  sum_{terms t with lo_t <= r < hi_t} usage_t(x_{var_t})  <=  room_r   for every row r

Forbidden costs are ``inf``.  A memory *term* is the usage of one variable over a run of rows; a
variable may have several.  Each term's least usage has been moved into ``room``.  Labels (the
strategies that are left) of all variables lie one behind the other, as in ``Problem``.

Doubles are exact here while totals stay below 2**53; whatever is found is evaluated again on the
original problem in integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import FORBIDDEN, NO_LIMIT, Ints, Problem, offsets

Floats = npt.NDArray[np.float64]


def runs(start: Ints, size: Ints) -> Ints:
    """start[0], start[0]+1, ... (size[0] numbers), start[1], ...: many ranges in one array."""
    ends = offsets(size)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(start - ends[:-1], size)


def chunks(start: Ints, cells: int = 1 << 18) -> Iterator[slice]:
    """Slices of consecutive edges that have about so many cells together, or are single.

    What indexes cells one by one does so chunk by chunk: indices of all cells at once would take
    several times the memory of the cells, and more time.
    """
    lo, last = 0, len(start) - 1
    while lo < last:
        hi = max(int(np.searchsorted(start, start[lo] + cells, "right")) - 1, lo + 1)
        yield slice(lo, hi)
        lo = hi


def dot(a: Floats, b: Floats) -> float:
    """The inner product without BLAS, whose threads cost more than they save at this size."""
    return float((a * b).sum())


def scatter_add(index: Ints, values: Floats, size: int) -> Floats:
    """out[i] = sum of the values whose index is i."""
    return np.asarray(np.bincount(index, values, size), np.float64)


@dataclass(frozen=True, eq=False)
class Model:
    """See the module for the mathematics; shapes: n variables, S labels, m edges, q terms."""

    start: Ints  # (n + 1,)
    unary: Floats  # (S,)
    edge: Ints  # (m, 2), first < second, unique
    edge_start: Ints  # (m + 1,)
    edge_cost: Floats
    term_var: Ints  # (q,)
    term_rows: Ints  # (q, 2), half open
    term_start: Ints  # (q + 1,)
    term_usage: Floats
    room: Floats  # (rows,)
    moment: Ints  # (rows,) which moment of the problem each row is
    constant: float = 0.0

    @property
    def num_vars(self) -> int:
        return len(self.start) - 1

    @cached_property
    def sizes(self) -> Ints:
        return np.diff(self.start)

    @cached_property
    def term_label(self) -> Ints:
        """For each entry of ``term_usage`` the label that it belongs to."""
        return runs(self.start[self.term_var], self.sizes[self.term_var])

    def matrix(self, e: int) -> Floats:
        a, b = self.edge[e]
        cells = self.edge_cost[self.edge_start[e] : self.edge_start[e + 1]]
        return cells.reshape(self.sizes[a], self.sizes[b])

    def priced(self, price: Floats) -> Floats:
        """Unary costs with memory paid for: unary + sum_t usage_t * (prices of its rows)."""
        if not len(self.term_var):
            return self.unary
        total = np.concatenate([[0.0], np.cumsum(price)])
        paid = total[self.term_rows[:, 1]] - total[self.term_rows[:, 0]]
        per_entry = self.term_usage * np.repeat(paid, np.diff(self.term_start))
        return self.unary + scatter_add(self.term_label, per_entry, len(self.unary))

    def load(self, x: Ints) -> Floats:
        """Memory used in every row, beyond what was moved into ``room``."""
        used = self.term_usage[self.term_start[:-1] + x[self.term_var]]
        rows = len(self.room)
        change = scatter_add(self.term_rows[:, 0], used, rows + 1)
        change -= scatter_add(self.term_rows[:, 1], used, rows + 1)
        out: Floats = np.cumsum(change)[:rows]
        return out

    def cost(self, x: Ints) -> float:
        a, b = self.edge[:, 0], self.edge[:, 1]
        cells = self.edge_start[:-1] + x[a] * self.sizes[b] + x[b]
        return float(
            self.constant + self.unary[self.start[:-1] + x].sum() + self.edge_cost[cells].sum()
        )

    def fits(self, x: Ints) -> bool:
        return bool((self.load(x) <= self.room).all())


def from_problem(p: Problem) -> Model:
    """The model of a problem as it stands, one variable per node; only self-loops are folded in."""
    unary = np.where(p.cost >= FORBIDDEN, np.inf, p.cost.astype(np.float64))
    cells = np.where(p.edge_cost >= FORBIDDEN, np.inf, p.edge_cost.astype(np.float64))
    first, second = p.edge[:, 0], p.edge[:, 1]
    for e in np.flatnonzero(first == second):
        v = first[e]
        diagonal = cells[p.edge_start[e] : p.edge_start[e + 1] : p.num_strategies[v] + 1]
        unary[p.strategy_start[v] : p.strategy_start[v + 1]] += diagonal
    sizes = p.num_strategies
    edge, edge_start, edge_cost = unique_edges(sizes, p.edge, p.edge_start, cells)

    alive = np.flatnonzero(p.interval[:, 0] < p.interval[:, 1])
    if p.usage_limit == NO_LIMIT:
        alive = alive[:0]
    times, rows = np.unique(p.interval[alive], return_inverse=True)
    rows = rows.reshape(-1, 2)
    # Least usages leave the room as integers: only what choices differ by need fit into a double.
    least = np.minimum.reduceat(p.usage, p.strategy_start[:-1])[alive] if len(alive) else alive
    change = np.zeros(len(times), object)
    np.add.at(change, rows[:, 0], least.astype(object))
    np.subtract.at(change, rows[:, 1], least.astype(object))
    room = p.usage_limit - np.cumsum(change)[: max(len(times) - 1, 0)]
    return Model(
        start=p.strategy_start,
        unary=unary,
        edge=edge,
        edge_start=edge_start,
        edge_cost=edge_cost,
        term_var=alive,
        term_rows=rows,
        term_start=offsets(sizes[alive]),
        term_usage=(
            p.usage[runs(p.strategy_start[alive], sizes[alive])] - np.repeat(least, sizes[alive])
        ).astype(np.float64),
        room=room.astype(np.float64),
        moment=np.arange(max(len(times) - 1, 0)),
    )


def unique_edges(
    sizes: Ints, edge: Ints, edge_start: Ints, cells: Floats
) -> tuple[Ints, Ints, Floats]:
    """Turn every edge so that first < second, add up parallel ones, drop self-loops.

    Edges stay in the order in which their pairs first appear.
    """
    if not len(edge):
        return edge, edge_start, cells
    count = np.diff(edge_start)
    turned = edge[:, 0] > edge[:, 1]
    pairs = np.where(turned[:, None], edge[:, ::-1], edge)
    loop = pairs[:, 0] == pairs[:, 1]
    _, first, of_key = np.unique(
        pairs[:, 0] * len(sizes) + pairs[:, 1], return_index=True, return_inverse=True
    )
    leads = np.zeros(len(edge), bool)
    leads[first] = True
    leads &= ~loop
    # Most edges are the first of their pair and lie as they should: a copy in order, or no copy.
    simple = leads & ~turned
    if simple.all():
        return pairs, edge_start, cells
    slot = np.cumsum(leads)[first][of_key] - 1
    out_start = offsets(count[leads])
    out = np.zeros(out_start[-1])
    out[np.repeat(simple[leads], count[leads])] = cells[np.repeat(simple, count)]
    for e in np.flatnonzero(~simple & ~loop):
        matrix = cells[edge_start[e] : edge_start[e + 1]]
        if turned[e]:
            matrix = matrix.reshape(sizes[edge[e, 0]], sizes[edge[e, 1]]).T.ravel()
        out[out_start[slot[e]] : out_start[slot[e] + 1]] += matrix
    return pairs[leads], out_start, out
