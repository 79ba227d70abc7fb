"""What a folded problem costs: nodes and edges under construction.

Costs are picoseconds of a step; a forbidden pair stays forbidden whatever is added to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from autopar.nouns.graph import Tensor
from autopar.nouns.problem import FORBIDDEN, Problem
from autopar.planner.problem.codes import Ints
from autopar.planner.problem.move_prices import MovePrices
from autopar.planner.problem.nodes import Node
from autopar.planner.problem.piece_prices import Neighbours


@dataclass(frozen=True, slots=True)
class _Way:
    """From what node ``source`` gives (by name) to what each option of node ``target`` wants.

    Equal ways cost the same: of many calls of a block one is priced.
    """

    source: tuple[int, str]
    target: int
    shape: tuple[int, ...]
    dtype: str
    grad: bool
    handed: bool
    wants: bytes


@dataclass(slots=True)
class Ledger:
    """Nodes and edge matrices; ``microbatches`` is how often a step runs what is entered once."""

    moves: MovePrices
    microbatches: int
    nodes: list[Node] = field(default_factory=list)
    _times: Counter[_Way] = field(default_factory=Counter)
    _moved: dict[_Way, Ints] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """Enters a node; returns its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def unary(
        self,
        node: Node,
        tensor: Tensor,
        source: int,
        wants: Ints,
        times: int,
        grad: bool,
        handed: bool = False,
    ) -> None:
        """Adds the resharding from a given ``source`` to what each option of ``node`` wants.

        ``handed``: see `Prices.move`.
        """
        moved = self.moves.between(tensor, np.array([source]), wants, grad, handed)[0]
        node.costs = capped_sum(node.costs, self._scaled(moved, times))

    def leave(self, node: Node, tensor: Tensor, gives: Ints, wants: Ints, grad: bool) -> None:
        """Adds, for each option of ``node``, the resharding from what it gives to its want."""
        targets, target_of = self.moves.codes.distinct(wants)
        moved = self.moves.between(tensor, gives, targets, grad)[np.arange(len(gives)), target_of]
        node.costs = capped_sum(node.costs, self._scaled(moved, 1))

    def edge(
        self,
        source: tuple[int, str],
        b: int,
        tensor: Tensor,
        wants: Ints,
        times: int,
        grad: bool,
        handed: bool = False,
        layers: Neighbours | None = None,
    ) -> None:
        """Adds the resharding from what node ``source`` gives to what node ``b`` wants.

        ``layers``: beside which it may be in pieces. They follow from the two nodes.
        """
        shape, dtype = tensor.shape, tensor.dtype
        way = _Way(source, b, shape, dtype, grad, handed, wants.tobytes())
        if way not in self._moved:
            gives = self.nodes[source[0]].results[source[1]]
            self._moved[way] = self.moves.between(tensor, gives, wants, grad, handed, layers)
        self._times[way] += times

    def problem(self) -> Problem:
        """All nodes live all the time: what a step keeps, it keeps at the peak."""
        costs = [n.costs for n in self.nodes]
        edges: dict[tuple[int, int], Ints] = {}
        for way, times in self._times.items():
            a, b, matrix = way.source[0], way.target, self._scaled(self._moved[way], times)
            if a == b:
                costs[a] = capped_sum(costs[a], matrix.diagonal())
                continue
            if a > b:
                a, b, matrix = b, a, matrix.T
            known = edges.get((a, b))
            edges[a, b] = matrix if known is None else capped_sum(known, matrix)
        return Problem.build(
            [(c, n.kept, (0, 1)) for c, n in zip(costs, self.nodes, strict=True)],
            [(a, b, m) for (a, b), m in edges.items()],
            labels=[n.labels() for n in self.nodes],
        )

    def _scaled(self, moved: Ints, times: int) -> Ints:
        weight = times * self.microbatches
        return np.where(
            moved >= FORBIDDEN, FORBIDDEN, np.minimum(moved, FORBIDDEN // weight) * weight
        )


def capped_sum(a: Ints, b: Ints) -> Ints:
    """A sum of costs that stays FORBIDDEN once it is."""
    return np.asarray(np.minimum(a + b, FORBIDDEN))
