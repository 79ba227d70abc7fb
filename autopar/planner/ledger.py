"""What a folded problem costs: nodes and edges under construction.

Costs are picoseconds of a step; a forbidden pair stays forbidden whatever is added to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.nouns.graph import Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.problem import FORBIDDEN, Problem
from autopar.nouns.sharding import Sharding
from autopar.planner.nodes import Node
from autopar.planner.prices import Prices
from autopar.rules.resharding import reshard

Matrix = npt.NDArray[np.int64]


@dataclass(slots=True)
class Ledger:
    """Nodes and edge matrices; ``microbatches`` is how often a step runs what is entered once."""

    mesh: Mesh
    prices: Prices
    microbatches: int
    nodes: list[Node] = field(default_factory=list)
    edges: dict[tuple[int, int], Matrix] = field(default_factory=dict)
    _moves: dict[tuple[object, ...], int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """Enters a node; returns its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def move(self, tensor: Tensor, source: Sharding, target: Sharding, grad: bool) -> int:
        """Picoseconds of one resharding, both ways; FORBIDDEN where there is no way."""
        place = (source, target, tensor.shape, tensor.dtype, grad)
        found = self._moves.get(place)
        if found is None:
            steps = reshard(source, target, tensor.shape, self.mesh, grad)
            found = FORBIDDEN if steps is None else sum(self.prices.steps(steps, tensor, grad))
            self._moves[place] = found
        return found

    def unary(
        self,
        node: Node,
        tensor: Tensor,
        source: Sharding,
        wants: list[Sharding],
        times: int,
        grad: bool,
    ) -> None:
        """Adds the resharding from a given ``source`` to what each option of ``node`` wants."""
        for i, want in enumerate(wants):
            cost = self.move(tensor, source, want, grad)
            node.costs[i] = capped_sum(node.costs[i], cost * times * self.microbatches)

    def edge(
        self,
        source: tuple[int, str],
        b: int,
        tensor: Tensor,
        wants: list[Sharding],
        times: int,
        grad: bool,
    ) -> None:
        """Adds the resharding from what node ``source`` gives to what node ``b`` wants."""
        a, inner = source
        gives = self.nodes[a].results[inner]
        rows, row_of = _unique(gives)
        columns, column_of = _unique(wants)
        small = np.array(
            [[self.move(tensor, s, t, grad) for t in columns] for s in rows], np.int64
        ).reshape(len(rows), len(columns))
        weight = times * self.microbatches
        small = np.where(small >= FORBIDDEN, FORBIDDEN, small * weight)
        full = small[np.ix_(row_of, column_of)]
        if a == b:
            node = self.nodes[a]
            for i in range(len(full)):
                node.costs[i] = capped_sum(node.costs[i], int(full[i, i]))
            return
        if a > b:
            a, b, full = b, a, full.T
        known = self.edges.get((a, b))
        self.edges[a, b] = full if known is None else np.minimum(known + full, FORBIDDEN)

    def problem(self, usage_limit: int | None) -> Problem:
        """All nodes live all the time: what a step keeps, it keeps at the peak."""
        return Problem.build(
            [(n.costs, n.usages, (0, 1)) for n in self.nodes],
            [(a, b, m) for (a, b), m in self.edges.items()],
            usage_limit,
            labels=[[o.split() if o != "whole" else [] for o in n.options] for n in self.nodes],
        )


def capped_sum(a: int, b: int) -> int:
    """A sum of costs that stays FORBIDDEN once it is."""
    return min(a + b, FORBIDDEN)


def _unique(items: list[Sharding]) -> tuple[list[Sharding], list[int]]:
    index: dict[Sharding, int] = {}
    positions = [index.setdefault(s, len(index)) for s in items]
    return list(index), positions
