"""Bucket elimination: exact minimisation of a pairwise model by dynamic programming.

Variables are eliminated in an order of small fill (greedy min-weight: the variable whose joint
table with its neighbours is smallest; Dechter, "Bucket elimination", 1999).  Eliminating v adds
up the functions that mention v and minimises over it:

    message_v(neighbours) = min_{x_v} [ unary_v(x_v) + sum of functions that mention v ]

When a joint table would pass ``table_limit`` cells, the functions are split into several buckets
that each minimise over a copy of v (mini-buckets, Dechter & Rish 2003): the result is then a lower
bound, and decoding, which looks at all functions of v again, is a good guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.model import Floats, Model

TABLE_LIMIT = 1 << 22
HOPELESS = 1 << 40  # cells that nothing holds


@dataclass(frozen=True)
class Bucket:
    """One minimisation: over ``var``, of a fixed table and of messages, into a new message.

    ``scope`` lists the other variables; axis i of the table belongs to ``scope[i]``, the last axis
    to ``var``.  ``messages`` are (number of an earlier bucket, shape to view its message in).
    """

    var: int
    scope: tuple[int, ...]
    table: Floats
    messages: tuple[tuple[int, tuple[int, ...]], ...]
    pays_unary: bool


class Elimination:
    """The elimination of one model, planned once and run for many unary costs."""

    def __init__(
        self,
        m: Model,
        table_limit: int = TABLE_LIMIT,
        spend: Callable[[int], None] | None = None,
    ) -> None:
        """``spend`` is called now and then with no evaluations, to end the search in time."""
        self.model = m
        self._spend = spend or (lambda evaluations: None)
        self.exact = True
        self.buckets: list[Bucket] = []
        self.of_var: list[list[int]] = [[] for _ in range(m.num_vars)]
        self.order = elimination_order(m)
        self._plan(table_limit)
        self.work = sum(b.table.size for b in self.buckets)

    def _plan(self, table_limit: int) -> None:
        m = self.model
        sizes = m.sizes.tolist()
        rank = [0] * m.num_vars
        for i, v in enumerate(self.order):
            rank[v] = i
        # Functions waiting at the first of their variables to be eliminated:
        # (other variables, matrix) for edges, (other variables, number) for messages.
        waiting: list[list[tuple[tuple[int, ...], Floats | int]]] = [[] for _ in sizes]
        for e, (a, b) in enumerate(m.edge.tolist()):
            matrix = m.matrix(e)
            if rank[a] < rank[b]:
                waiting[a].append(((b,), np.ascontiguousarray(matrix.T)))
            else:
                waiting[b].append(((a,), matrix))
        for v in self.order:
            self._spend(0)
            groups: list[tuple[set[int], list[tuple[tuple[int, ...], Floats | int]]]] = []
            for function in sorted(waiting[v], key=lambda f: -_cells(f[0], sizes)):
                for scope, members in groups:
                    joint = scope | set(function[0])
                    if _cells(joint, sizes) * sizes[v] <= table_limit:
                        scope |= joint
                        members.append(function)
                        break
                else:
                    groups.append((set(function[0]), [function]))
            if len(groups) > 1:
                self.exact = False
            for g, (scope, members) in enumerate(groups or [(set(), [])]):
                number = len(self.buckets)
                axes = tuple(sorted(scope, key=lambda w: rank[w]))
                bucket = self._bucket(v, axes, members, sizes, g == 0)
                self.buckets.append(bucket)
                self.of_var[v].append(number)
                if axes:
                    waiting[axes[0]].append((axes[1:], number))

    def _bucket(
        self,
        v: int,
        axes: tuple[int, ...],
        members: list[tuple[tuple[int, ...], Floats | int]],
        sizes: list[int],
        pays_unary: bool,
    ) -> Bucket:
        table = np.zeros([sizes[w] for w in axes] + [sizes[v]])
        messages = []
        for others, function in members:
            if isinstance(function, int):
                # An earlier message has its axes in elimination order with v first.
                shape = tuple(sizes[w] if w in others else 1 for w in axes)
                messages.append((function, shape))
            else:
                at = axes.index(others[0])
                shape = tuple(sizes[w] if i == at else 1 for i, w in enumerate(axes))
                table += function.reshape(*shape, sizes[v])
        return Bucket(v, axes, table, tuple(messages), pays_unary)

    def minimum(self, unary: Floats) -> tuple[float, Ints]:
        """The least total for these unary costs (a lower bound if not ``exact``), and a choice."""
        m = self.model
        messages: list[Floats] = []
        sums: list[Floats] = []
        bound = m.constant
        for bucket in self.buckets:
            self._spend(0)
            total = bucket.table
            v = bucket.var
            if bucket.pays_unary:
                total = total + unary[m.start[v] : m.start[v + 1]]
            for number, shape in bucket.messages:
                # v is the first axis of the earlier message and the last of this table.
                total = total + np.moveaxis(messages[number], 0, -1).reshape(*shape, -1)
            sums.append(total)
            message = total.min(axis=-1)
            messages.append(message)
            if not bucket.scope:
                bound += float(message)
        x = np.zeros(m.num_vars, np.int64)
        for v in reversed(self.order):
            score: Floats | float = 0.0
            for number in self.of_var[v]:
                bucket = self.buckets[number]
                score = score + sums[number][tuple(x[w] for w in bucket.scope)]
            x[v] = int(np.argmin(score))
        return bound, x


def _cells(scope: tuple[int, ...] | set[int], sizes: list[int]) -> int:
    cells: int = 1
    for w in scope:
        cells *= sizes[w]
    return cells


def elimination_cells(m: Model, limit: int) -> int:
    """Table cells of one elimination, or a number above the limit."""
    return _eliminate(m, limit)[1][0]


def component_cells(m: Model, root: Ints, limit: int) -> Ints:
    """For each variable, the table cells of eliminating its component, or a number above the limit.

    ``root`` names the component of each variable by one of its variables.
    """
    _, cells = _eliminate(m, limit, root)
    return np.array([min(c, limit + 1) for c in cells], np.int64)[root]


def table_share(m: Model, cells: int, most: int = TABLE_LIMIT) -> int:
    """A ``table_limit`` with which all tables together hold about so many cells."""
    if elimination_cells(m, cells) <= cells:
        return most
    return min(most, max(cells // max(m.num_vars, 1), 1))


def elimination_order(m: Model) -> list[int]:
    """Greedy: always the variable whose joint table with its neighbours is smallest.

    Where even that is beyond any memory the rest follows as numbered: its tables are split in any
    case, and joining the neighbours of a wide rest takes hours.
    """
    order, _ = _eliminate(m, HOPELESS)
    rest = np.ones(m.num_vars, bool)
    rest[order] = False
    return order + np.flatnonzero(rest).tolist()


def _eliminate(m: Model, limit: int, root: Ints | None = None) -> tuple[list[int], list[int]]:
    """The order and the cells by component; one that passes the limit is eliminated no further.

    Without ``root`` all variables count as one component.
    """
    import heapq

    component = [0] * m.num_vars if root is None else root.tolist()
    open_components = len(set(component))

    sizes = m.sizes.tolist()
    near: list[set[int]] = [set() for _ in sizes]
    for a, b in m.edge.tolist():
        near[a].add(b)
        near[b].add(a)

    def weight(v: int) -> int:
        return int(_cells(near[v], sizes) * sizes[v])

    current = [weight(v) for v in range(len(sizes))]
    heap = [(w, v) for v, w in enumerate(current)]
    heapq.heapify(heap)
    order: list[int] = []
    cells = [0] * max(m.num_vars, 1)
    done = [False] * len(sizes)
    while heap:
        w, v = heapq.heappop(heap)
        if done[v] or w != current[v] or cells[component[v]] > limit:
            continue
        done[v] = True
        order.append(v)
        cells[component[v]] += w
        if cells[component[v]] > limit:
            open_components -= 1
            if not open_components:
                break
            continue
        others = near[v]
        for a in others:
            near[a] |= others
            near[a] -= {a, v}
        for a in others:
            if (new := weight(a)) != current[a]:
                current[a] = new
                heapq.heappush(heap, (new, a))
    return order, cells
