"""A plan's folder, opened again: everything that follows from its decisions, and their prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autopar import plan_folder
from autopar.lowering import MICROBATCH, Lowered, LoweringError, lower
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Stage
from autopar.planner.bindings import Bindings
from autopar.planner.folding import fold
from autopar.planner.legal import NoStrategy
from autopar.planner.memory import step_memory
from autopar.planner.nodes import Folded, Node
from autopar.planner.prices import PICOSECONDS, Prices
from autopar.planner.search import splits_tp
from autopar.planner.simulation import StepTime, simulate
from autopar.planner.state import StateSharding
from autopar.planner.state_prices import StatePrices
from autopar.planner.summary import Summary, summarise
from autopar.precision import at_precision
from autopar.report.decisions import wrong_decision
from autopar.report.units import duration, size
from autopar.rules.batch import data_choices
from autopar.rules.fusion import ALONE, fusion
from autopar.rules.kept_whole import keep_whole
from autopar.searchers import search

SPLITS_NOTHING = "tp would split no op, so its ranks would all do the same work"


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Answers that a rule of the planner excludes; the best of them differs by ``extra_s``."""

    rule: str
    extra_s: float


@dataclass(frozen=True, slots=True)
class Revisited:
    """``choice`` is the plan's own strategy at every node of the folded problem."""

    plan: Plan
    graph: Graph
    cluster: Cluster
    batch_dims: Mapping[str, int]
    lowered: Lowered
    prices: Prices
    sharding: StateSharding
    time: StepTime
    folded: Folded
    choice: tuple[int, ...]
    forbidden: tuple[Forbidden, ...]

    def objection(self, choice: Iterable[int]) -> str:
        """What speaks against an answer that the additive prices put below the plan."""
        plan = self.plan
        stage = replace(self.folded.stage(choice), mesh=plan.stages[0].mesh)
        if plan.degrees["tp"] > 1 and not splits_tp(stage):
            return f"not allowed: {SPLITS_NOTHING}"
        summary = _summary(stage, plan, self.graph, self.batch_dims, self.prices)
        memory = step_memory(summary, self.sharding, plan.recompute, self.cluster.device)
        if memory.total > memory.limit:
            return f"does not fit by {size(memory.total - memory.limit)}"
        time_s = simulate(summary, self.sharding, self.cluster, plan.recompute).total_s
        if time_s >= self.time.total_s:
            return f"simulated with overlap {duration(time_s - self.time.total_s)} slower"
        return (
            f"the search ({plan.searcher}) missed it: {duration(self.time.total_s - time_s)} less"
        )


def open_folder(folder: str | Path) -> Revisited:
    """The plan in ``folder``; needs neither the model nor its framework.

    Raises `PlanFolderError`.
    """
    plan = plan_folder.read_plan(folder)
    graph = keep_whole(plan_folder.read_graph(folder), plan.replicated_ops)
    graph = at_precision(graph, plan.precision)
    dims = {e.name: e.batch_dim for e in plan_folder.read_batch(folder) if e.batch_dim is not None}
    wrong = wrong_decision(plan, graph)
    if not wrong:
        try:
            return revisit(plan, plan_folder.read_cluster(folder), graph, dims)
        except (LoweringError, NoStrategy) as error:
            wrong = str(error)
    raise plan_folder.PlanFolderError(
        f"{Path(folder) / plan_folder.PLAN}: {wrong}. Put it right, or plan the model again"
    )


def revisit(plan: Plan, cluster: Cluster, graph: Graph, batch_dims: Mapping[str, int]) -> Revisited:
    """Lowers and prices a plan again, with ``graph`` at the plan's precision.

    Data traffic is priced at the share that the simulation leaves exposed, and strategies are legal
    where they were to the search.
    """
    choices = data_choices(graph, batch_dims)
    (stage,) = plan.stages
    mesh = Mesh((MICROBATCH, *stage.mesh.axes), (plan.microbatches, *stage.mesh.sizes)).trimmed()
    kernels = fusion(graph) if plan.style == "compiled" else ALONE
    prices = Prices(cluster, mesh, plan.precision, kernels)
    sharding = StateSharding(
        plan.zero, stage.mesh, plan.microbatches, plan.precision, plan.optimizer
    )
    lowered = lower(graph, stage, plan.microbatches, choices, batch_dims)
    summary = summarise(lowered, prices, plan.framework)
    time = simulate(summary, sharding, cluster, plan.recompute)
    state = StatePrices(cluster, sharding, time.exposed_share)
    bindings = Bindings()

    def folded(must_split: bool) -> Folded:
        return fold(
            graph,
            mesh,
            choices,
            batch_dims,
            prices,
            state,
            bindings,
            must_split=must_split,
            even=plan.framework == "jax",
            recompute=plan.recompute != "none",
        )

    free = folded(must_split=False)
    own = _choice(free, plan)
    if own is None:
        raise LoweringError(
            f"its decisions are not all among those that the mesh {stage.mesh} leaves open"
        )
    forbidden: tuple[Forbidden, ...] = ()
    if plan.degrees["tp"] > 1:
        best = search(free.problem, searcher="elimination")
        if not splits_tp(free.stage(best.choice.tolist())):
            split = folded(must_split=True)
            chosen = _choice(split, plan)
            if chosen is not None:
                extra_s = (best.cost - free.problem.total(own)) / PICOSECONDS
                forbidden = (Forbidden(SPLITS_NOTHING, extra_s),)
                free, own = split, chosen
    return Revisited(
        plan, graph, cluster, batch_dims, lowered, prices, sharding, time, free, own, forbidden
    )


def _summary(
    stage: Stage, plan: Plan, graph: Graph, batch_dims: Mapping[str, int], prices: Prices
) -> Summary:
    choices = data_choices(graph, batch_dims)
    lowered = lower(graph, stage, plan.microbatches, choices, batch_dims)
    return summarise(lowered, prices, plan.framework)


def _choice(folded: Folded, plan: Plan) -> tuple[int, ...] | None:
    """The plan's option at every node; None where one of them is not legal there."""
    found = [_own(node, plan) for node in folded.nodes]
    return None if None in found else tuple(i for i in found if i is not None)


def _own(node: Node, plan: Plan) -> int | None:
    """Which of a node's options the plan has chosen."""
    (stage,) = plan.stages
    if node.kind == "op":
        chosen = stage.ops.get(node.key, "whole")
    else:
        decisions = stage.shared if node.kind == "shared" else stage.parameters
        chosen = decisions.get(node.key, "R")
    options = node.options
    return options.index(chosen) if chosen in options else None
