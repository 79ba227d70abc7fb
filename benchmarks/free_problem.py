"""The sharding problem of a whole graph on a mesh whose axes are all free.

`search_plan` gives the batch to data axes and searches the rest. Here no axis has a meaning
beforehand: each may split any factor of any op, so that data, tensor, sequence and spatial
parallelism, and all mixtures of them, are points of one space. Model state is kept as it is used
(a parameter that an axis leaves whole is replicated over it, and its gradient reduced).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.lowering.lowered import BATCH_AXES, Lowered
from autopar.lowering.spread import lower
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.problem import Problem
from autopar.planner.problem.bindings import Bindings
from autopar.planner.problem.folding import fold
from autopar.planner.problem.nodes import Folded
from autopar.pricing.prices import Prices
from autopar.pricing.repricing import objective
from autopar.pricing.state import StateSharding
from autopar.pricing.state_prices import StatePrices
from autopar.rules.cut import BatchCut, Cut


@dataclass(frozen=True, slots=True)
class FreeProblem:
    """The folded problem in picoseconds of a step, and what gives its answers a meaning."""

    graph: Graph
    folded: Folded
    prices: Prices
    state: StatePrices
    cut: BatchCut

    @property
    def problem(self) -> Problem:
        return self.folded.problem

    def lowered(self, choice: Iterable[int]) -> Lowered:
        """Every sharding and collective that an answer implies."""
        return lower(self.graph, self.folded.spread(choice), 1, self.cut)

    def priced_again(self, choice: Iterable[int]) -> int:
        """The objective of an answer, added up op by op from what it lowers to."""
        return objective(self.lowered(choice), self.prices, self.state)


def free_problem(
    graph: Graph,
    cluster: Cluster,
    mesh: Mesh,
    precision: str,
    optimizer: str = "adamw",
    usage_limit: int | None = None,
) -> FreeProblem:
    """``usage_limit``: bytes per device for state and activations.

    Raises:
        ValueError: an axis has the name of a data axis, whose meaning is fixed.
    """
    fixed = [a for a in mesh.axes if a in BATCH_AXES]
    if fixed:
        raise ValueError(f"axes {', '.join(fixed)} are data axes; name free axes otherwise")
    mesh = mesh.trimmed()
    prices = Prices(cluster, mesh, precision)
    state = StatePrices(cluster, StateSharding(0, mesh, 1, precision, optimizer))
    bodies = [(None, graph), *((name, block.body) for name, block in graph.blocks.items())]
    whole = {key(block, op.name): "" for block, body in bodies for op in body.ops}
    free = BatchCut(Cut({}, whole))
    folded = fold(graph, mesh, free, prices, state, Bindings(), usage_limit)
    return FreeProblem(graph, folded, prices, state, free)
