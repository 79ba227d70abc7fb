"""A plan's folder, opened again: everything that follows from its decisions, and their prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar import plan_folder
from autopar.lowering import MICROBATCH, Lowered, lower
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan
from autopar.planner.bindings import Bindings
from autopar.planner.folding import fold
from autopar.planner.nodes import Folded, Node
from autopar.planner.precision import at_precision
from autopar.planner.prices import Prices
from autopar.planner.simulation import simulate
from autopar.planner.state import StateSharding
from autopar.planner.state_prices import StatePrices
from autopar.planner.summary import summarise
from autopar.rules.batch import data_choices
from autopar.rules.kept_whole import keep_whole


@dataclass(frozen=True, slots=True)
class Revisited:
    """``choice`` is the plan's own strategy at every node of the folded problem."""

    plan: Plan
    lowered: Lowered
    prices: Prices
    folded: Folded
    choice: tuple[int, ...]


def open_folder(folder: str | Path) -> Revisited:
    """The plan in ``folder``; needs neither the model nor its framework.

    Raises `PlanFolderError`.
    """
    plan = plan_folder.read_plan(folder)
    graph = keep_whole(plan_folder.read_graph(folder), plan.replicated_ops)
    graph = at_precision(graph, plan.precision)
    return revisit(
        plan, plan_folder.read_cluster(folder), graph, plan_folder.read_batch_dims(folder)
    )


def revisit(plan: Plan, cluster: Cluster, graph: Graph, batch_dims: Mapping[str, int]) -> Revisited:
    """Lowers and prices a plan again, with ``graph`` at the plan's precision.

    Data traffic is priced at the share that the simulation leaves exposed, as the search did.
    """
    choices = data_choices(graph, batch_dims)
    (stage,) = plan.stages
    mesh = Mesh((MICROBATCH, *stage.mesh.axes), (plan.microbatches, *stage.mesh.sizes)).trimmed()
    prices = Prices(cluster, mesh, plan.precision)
    sharding = StateSharding(
        plan.zero, stage.mesh, plan.microbatches, plan.precision, plan.optimizer
    )
    lowered = lower(graph, stage, plan.microbatches, choices, batch_dims)
    exposed = simulate(summarise(lowered, prices), sharding, cluster, plan.recompute).exposed_share
    state = StatePrices(cluster, sharding, exposed)
    folded = fold(graph, mesh, choices, batch_dims, prices, state, Bindings())
    return Revisited(plan, lowered, prices, folded, tuple(_own(n, plan) for n in folded.nodes))


def _own(node: Node, plan: Plan) -> int:
    """Which of a node's options the plan has chosen."""
    (stage,) = plan.stages
    if node.kind == "op":
        return node.options.index(stage.ops.get(node.key, "whole"))
    decisions = stage.shared if node.kind == "shared" else stage.parameters
    return node.options.index(decisions.get(node.key, "R"))
