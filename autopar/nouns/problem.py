"""The sharding problem.

Choose one strategy ``x[i]`` for every node ``i`` so that

    minimise    sum_i c_i(x[i])  +  sum_{(a,b)} E_ab(x[a], x[b])
    subject to  sum_{i alive at t} u_i(x[i])  <=  usage_limit      for every time t

which is the problem of the ASPLOS 2025 contest on intra-operator parallelism (google/iopddl).
Costs and usages are integers of 64 bits; a cost of ``FORBIDDEN`` (10**18) or more rules a strategy,
or a pair of strategies, out.  Totals are computed without overflow.

Everything inside is columnar: strategies of all nodes lie one behind the other, node ``i`` owning
``strategy_start[i]:strategy_start[i + 1]``; matrices of edges likewise, row = strategy of the
edge's first node, column = strategy of its second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

FORBIDDEN = 10**18
"""A cost at or above this value forbids the choice (contest format)."""
NO_LIMIT = 2**63 - 1
"""The usage limit of a problem without one."""

Ints = npt.NDArray[np.int64]


class ProblemError(ValueError):
    """What is wrong with a sharding problem; the subclasses name the kind."""


class NotAProblem(ProblemError):
    """The text is truncated, is not JSON, or is not in the contest's format."""


class NoStrategies(ProblemError):
    """A node has no strategy, or unequal numbers of costs and usages."""


class MissingNode(ProblemError):
    """An edge names a node that does not exist."""


class WrongMatrixSize(ProblemError):
    """An edge's matrix does not have one cell per pair of strategies."""


class ReversedInterval(ProblemError):
    """A life interval ends before it begins."""


class NegativeMemory(ProblemError):
    """A usage, or the usage limit, is below zero."""


class NumberTooLarge(ProblemError):
    """A number is not an integer of 64 bits."""


class NoFeasibleAnswer(ProblemError):
    """No choice keeps to the usage limit and to what the costs forbid.

    ``least_limit`` is the smallest usage limit known to allow an answer (None: none is known), and
    no limit below ``proven_limit`` allows one.
    """

    def __init__(
        self, message: str, least_limit: int | None = None, proven_limit: int | None = None
    ) -> None:
        super().__init__(message)
        self.least_limit = least_limit
        self.proven_limit = proven_limit


def exact_sum(values: Ints) -> int:
    """The sum of 64-bit integers as a Python integer, never overflowing."""
    low = int((values & 0xFFFFFFFF).sum(dtype=np.int64))
    return (int((values >> 32).sum(dtype=np.int64)) << 32) + low


def offsets(sizes: Ints) -> Ints:
    """Starts of consecutive runs of the given sizes, and the end of the last one."""
    out = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


@dataclass(frozen=True, eq=False)
class Problem:
    """See the module for the mathematics.

    ``interval[i] = [lo, hi)`` is the life of node i; an empty one uses no memory.  ``scale`` says
    what the integers mean: cost 1 is ``1 / scale`` of the builder's unit (the planner's: seconds).
    ``labels[s]``, where given, lists the decisions that strategy ``s`` (counted over all nodes)
    consists of, such as ``("tp:h", "dp:b")``; searchers that decide by meaning read them.
    """

    strategy_start: Ints
    cost: Ints
    usage: Ints
    interval: Ints
    edge: Ints
    edge_start: Ints
    edge_cost: Ints
    usage_limit: int = NO_LIMIT
    name: str = ""
    scale: float = 1.0
    labels: tuple[tuple[str, ...], ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for column in (self.strategy_start, self.cost, self.usage, self.interval, self.edge):
            column.setflags(write=False)
        self.edge_start.setflags(write=False)
        self.edge_cost.setflags(write=False)
        _check(self)

    @property
    def num_nodes(self) -> int:
        return len(self.strategy_start) - 1

    @property
    def num_edges(self) -> int:
        return len(self.edge)

    @cached_property
    def num_strategies(self) -> Ints:
        """Strategies per node, shape (num_nodes,)."""
        return np.diff(self.strategy_start)

    def matrix(self, edge: int) -> Ints:
        """The cost matrix of an edge, shape (strategies of its first, of its second node)."""
        a, b = self.edge[edge]
        cells = self.edge_cost[self.edge_start[edge] : self.edge_start[edge + 1]]
        return cells.reshape(self.num_strategies[a], self.num_strategies[b])

    @staticmethod
    def build(
        nodes: Iterable[tuple[Sequence[float] | Ints, Sequence[float] | Ints, Sequence[int]]],
        edges: Iterable[tuple[int, int, Any]],
        usage_limit: float | None = None,
        *,
        scale: float = 1.0,
        name: str = "",
        labels: Sequence[Sequence[Sequence[str]]] | None = None,
    ) -> Problem:
        """A problem from Python lists.

        ``nodes`` are ``(costs, usages, (lo, hi))``; ``edges`` are ``(a, b, matrix)`` with a nested
        or flat matrix.  Each cost is multiplied by ``scale`` and rounded to the nearest integer
        (``scale=1e12`` stores seconds as picoseconds), so a total of ``T`` terms is off by at
        most ``T / (2 scale)``; ``inf`` becomes ``FORBIDDEN``.  Searchers work in doubles and are
        exact while totals stay below 2**53: 9,000 s at ``scale=1e12``.  Usages are rounded up,
        the limit down; ``usage_limit=None`` means no limit.  ``labels[i][k]`` lists the decisions
        of node i's strategy k.
        """
        costs: list[Ints] = []
        usages: list[Ints] = []
        life: list[tuple[int, int]] = []
        for i, (node_costs, node_usages, (lo, hi)) in enumerate(nodes):
            costs.append(_scaled(node_costs, scale, f"costs of node {i}"))
            usages.append(_rounded_up(node_usages, f"usages of node {i}"))
            life.append((int(lo), int(hi)))
            if len(costs[-1]) != len(usages[-1]):
                raise NoStrategies(
                    f"node {i} has {len(costs[-1])} costs but {len(usages[-1])} usages"
                )
        sizes = np.array([len(c) for c in costs], np.int64)
        pairs: list[tuple[int, int]] = []
        cells: list[Ints] = []
        for e, (a, b, matrix) in enumerate(edges):
            pairs.append((int(a), int(b)))
            cells.append(_scaled(matrix, scale, f"matrix of edge {e}"))
        if labels is not None and [len(of_node) for of_node in labels] != sizes.tolist():
            raise NoStrategies("labels must list every strategy of every node")
        return Problem(
            strategy_start=offsets(sizes),
            cost=np.concatenate([*costs, np.zeros(0, np.int64)]),
            usage=np.concatenate([*usages, np.zeros(0, np.int64)]),
            interval=np.array(life, np.int64).reshape(-1, 2),
            edge=np.array(pairs, np.int64).reshape(-1, 2),
            edge_start=offsets(np.array([len(c) for c in cells], np.int64)),
            edge_cost=np.concatenate([*cells, np.zeros(0, np.int64)]),
            usage_limit=NO_LIMIT if usage_limit is None else int(np.floor(usage_limit)),
            name=name,
            scale=scale,
            labels=None
            if labels is None
            else tuple(tuple(s) for of_node in labels for s in of_node),
        )

    # -- the exact evaluator -------------------------------------------------------------------

    def total(self, choice: npt.ArrayLike) -> int:
        """The exact cost of one strategy per node; FORBIDDEN or more if a choice is ruled out."""
        x = self._valid(choice)
        picked = self.cost[self.strategy_start[:-1] + x]
        on_edges = self.edge_cost[self._cells(x)]
        total = exact_sum(picked) + exact_sum(on_edges)
        ruled_out = bool((picked >= FORBIDDEN).any() or (on_edges >= FORBIDDEN).any())
        return max(total, FORBIDDEN) if ruled_out else total

    def allowed(self, choice: npt.ArrayLike) -> bool:
        """True when no strategy and no pair of strategies in the choice is forbidden."""
        x = self._valid(choice)
        return bool(
            (self.cost[self.strategy_start[:-1] + x] < FORBIDDEN).all()
            and (self.edge_cost[self._cells(x)] < FORBIDDEN).all()
        )

    def peak(self, choice: npt.ArrayLike) -> int:
        """The largest sum of usages alive at one time, exactly."""
        x = self._valid(choice)
        alive, born, dies, moments = self._events
        used = self.usage[self.strategy_start[:-1] + x][alive]
        if int(used.max(initial=0)) * max(len(used), 1) < 2**62:
            change = np.zeros(moments + 1, np.int64)
        else:
            change, used = np.zeros(moments + 1, object), used.astype(object)
        np.add.at(change, born, used)
        np.subtract.at(change, dies, used)
        return int(max(np.cumsum(change).tolist(), default=0))

    def excess(self, choice: npt.ArrayLike) -> int:
        """By how much the peak passes the limit; not above zero where it keeps to it."""
        return 0 if self.usage_limit == NO_LIMIT else self.peak(choice) - self.usage_limit

    def feasible(self, choice: npt.ArrayLike) -> bool:
        """True when nothing forbidden is chosen and memory keeps to the limit at all times."""
        return self.allowed(choice) and self.excess(choice) <= 0

    @cached_property
    def _events(self) -> tuple[Ints, Ints, Ints, int]:
        alive = np.flatnonzero(self.interval[:, 0] < self.interval[:, 1])
        times, index = np.unique(self.interval[alive], return_inverse=True)
        index = index.reshape(-1, 2)
        return alive, index[:, 0], index[:, 1], len(times)

    def _cells(self, x: Ints) -> Ints:
        a, b = self.edge[:, 0], self.edge[:, 1]
        return np.asarray(self.edge_start[:-1] + x[a] * self.num_strategies[b] + x[b])

    def _valid(self, choice: npt.ArrayLike) -> Ints:
        x = np.asarray(choice, np.int64)
        if x.shape != (self.num_nodes,):
            raise ProblemError(f"a choice has {self.num_nodes} numbers, not {x.shape}")
        wrong = (x < 0) | (x >= self.num_strategies)
        if wrong.any():
            i = int(wrong.argmax())
            raise ProblemError(f"node {i} has {self.num_strategies[i]} strategies, not {x[i]}")
        return x


def _scaled(values: Any, scale: float, what: str) -> Ints:
    array = np.asarray(values)
    if array.dtype.kind in "iu" and scale == 1:
        return array.astype(np.int64).ravel()
    numbers = np.asarray(array, np.float64).ravel()
    if np.isnan(numbers).any() or np.isneginf(numbers).any():
        raise NumberTooLarge(f"{what}: every cost must be a number above -inf, not {values!r}")
    scaled = numbers * scale
    if (np.isfinite(numbers) & (np.abs(scaled) >= FORBIDDEN)).any() and scale != 1:
        raise NumberTooLarge(
            f"{what}: {numbers[np.isfinite(numbers)].max():g} times scale {scale:g} reaches "
            f"{FORBIDDEN:.0e}, which means forbidden; take a smaller scale"
        )
    return np.rint(np.minimum(scaled, float(FORBIDDEN))).astype(np.int64)


def _rounded_up(values: Any, what: str) -> Ints:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        array = np.ceil(np.asarray(array, np.float64))
        if not (np.abs(array) < 2.0**63).all():
            raise NumberTooLarge(f"{what}: every usage must fit into 64 bits, not {values!r}")
    return array.astype(np.int64).ravel()


def _check(p: Problem) -> None:
    """Refuse what is not a problem, naming the first thing that is wrong."""
    sizes = np.diff(p.strategy_start)
    if len(empty := np.flatnonzero(sizes <= 0)):
        raise NoStrategies(f"node {empty[0]} has no strategies")
    if len(p.cost) != len(p.usage) or len(p.cost) != p.strategy_start[-1]:
        raise NoStrategies(f"{len(p.cost)} costs but {len(p.usage)} usages")
    if len(p.interval) != len(sizes):
        raise NotAProblem(f"{len(sizes)} nodes but {len(p.interval)} intervals")
    if len(turned := np.flatnonzero(p.interval[:, 0] > p.interval[:, 1])):
        i = turned[0]
        raise ReversedInterval(f"node {i} lives from {p.interval[i, 0]} to {p.interval[i, 1]}")
    if len(negative := np.flatnonzero(p.usage < 0)):
        i = int(np.searchsorted(p.strategy_start, negative[0], "right")) - 1
        raise NegativeMemory(f"node {i} has the usage {p.usage[negative[0]]}")
    if p.usage_limit < 0:
        raise NegativeMemory(f"the usage limit is {p.usage_limit}")
    if p.usage_limit > NO_LIMIT:
        raise NumberTooLarge(f"the usage limit {p.usage_limit} does not fit into 64 bits")
    if (p.cost <= -FORBIDDEN).any() or (p.edge_cost <= -FORBIDDEN).any():
        raise NumberTooLarge(f"a cost is at or below {-FORBIDDEN}")
    if len(p.edge) != len(p.edge_start) - 1:
        raise WrongMatrixSize(f"{len(p.edge)} edges but {len(p.edge_start) - 1} matrices")
    if len(lost := np.flatnonzero(((p.edge < 0) | (p.edge >= len(sizes))).any(axis=1))):
        e = lost[0]
        raise MissingNode(f"edge {e} joins {p.edge[e].tolist()}, but there are {len(sizes)} nodes")
    wanted = sizes[p.edge[:, 0]] * sizes[p.edge[:, 1]]
    if len(wrong := np.flatnonzero(np.diff(p.edge_start) != wanted)):
        e = wrong[0]
        a, b = p.edge[e]
        raise WrongMatrixSize(
            f"edge {e} joins nodes {a} and {b} with {sizes[a]} x {sizes[b]} strategies, "
            f"but its matrix has {p.edge_start[e + 1] - p.edge_start[e]} cells"
        )
    if p.labels is not None and len(p.labels) != len(p.cost):
        raise NoStrategies(f"{len(p.cost)} strategies but {len(p.labels)} labels")
