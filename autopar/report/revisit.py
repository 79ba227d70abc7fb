"""A plan's folder, opened again: everything that follows from its decisions, and their prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.files import plan_folder
from autopar.lowering.lowered import Lowered, LoweringError
from autopar.lowering.of_plan import check_recipes, plan_cut
from autopar.lowering.shared_experts import may_have_beside
from autopar.lowering.spread import lower
from autopar.lowering.stages import CutError
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import Plan, Spread
from autopar.nouns.prediction import Memory
from autopar.planner.ask.sentences import short_text
from autopar.planner.problem.bindings import Bindings
from autopar.planner.problem.folding import fold
from autopar.planner.problem.legal import NoStrategy
from autopar.planner.problem.nodes import Folded, Node
from autopar.planner.solve.solved import idle_axes
from autopar.pricing.in_pieces import ONE
from autopar.pricing.planned import PricedPipeline, planned_state, price_pipeline
from autopar.pricing.prices import PICOSECONDS, Prices
from autopar.pricing.state import StateSharding
from autopar.pricing.state_prices import StatePrices
from autopar.pricing.step_time import StepTime
from autopar.pricing.summary import Summary, summarise
from autopar.report.opened import opened, refuse
from autopar.report.units import duration
from autopar.rules.cut import BatchCut
from autopar.rules.fusion import fusion
from autopar.searchers import search


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
    cut: BatchCut
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
        spread = replace(self.folded.spread(choice), mesh=plan.spreads[0].mesh)
        if idle := idle_axes(spread):
            return f"not allowed: {splits_nothing(idle)}"
        lowered = self._lowered(spread)
        summary = summarise(lowered, self.prices, plan.framework)
        memory, time = _priced(plan, lowered, summary, self.prices, self.cluster)
        if not memory.fits:
            return f"does not fit by {short_text(memory)}"
        time_s = time.total_s
        if time_s >= self.time.total_s:
            return f"simulated with overlap {duration(time_s - self.time.total_s)} slower"
        less = duration(self.time.total_s - time_s)
        return f"left out by --fix, or missed by the search ({plan.searcher}): {less} less"

    def _lowered(self, spread: Spread) -> Lowered:
        return lower(self.graph, spread, self.plan.microbatches, self.cut)

    def pipeline(self) -> PricedPipeline:
        """The plan's stages, played."""
        summary = summarise(self.lowered, self.prices, self.plan.framework)
        return price_pipeline(self.plan, self.lowered, summary, self.prices, self.cluster)


def open_folder(folder: str | Path) -> Revisited:
    """The plan in ``folder``; needs neither the model nor its framework.

    Raises `PlanFolderError`.
    """
    contents = opened(folder)
    try:
        cluster = plan_folder.read_cluster(folder)
        return revisit(contents.plan, cluster, contents.graph, contents.batch_dims)
    except (CutError, LoweringError, NoStrategy) as error:
        refuse(folder, str(error))


def revisit(plan: Plan, cluster: Cluster, graph: Graph, batch_dims: Mapping[str, int]) -> Revisited:
    """Lowers and prices a plan again, with ``graph`` at the plan's precision.

    Data traffic is priced at the share that the simulation leaves exposed, and strategies are legal
    where they were to the search.
    """
    cut = plan_cut(plan, graph, batch_dims)
    stage = plan.stages[0]
    spread = plan.spreads[stage.spread]
    mesh = spread.mesh.timed(plan.microbatches, plan.seq_slices or 1)
    kernels = fusion(graph, plan.style)
    # What the search could choose among: with one piece alone it is as if none were.
    counts = COUNTS if plan.tp_pieces else ONE
    routed = COUNTS if plan.expert_pieces else ONE
    looked = plan.style == "eager" and not cluster.one_host
    beside = may_have_beside(graph) if looked or plan.shared_experts else frozenset[str]()
    given = cluster, mesh, plan.precision, kernels
    prices = Prices(*given, pieces=counts, expert_pieces=routed, beside=beside)
    sharding = planned_state(plan, stage)
    lowered = lower(graph, spread, plan.microbatches, cut)
    check_recipes(lowered)
    summary = summarise(lowered, prices, plan.framework)
    _, time = _priced(plan, lowered, summary, prices, cluster)
    # The search of a pipeline takes the traffic of its data axes as hidden.
    exposed = time.exposed_share if len(plan.stages) == 1 else 0.0
    state = StatePrices(cluster, sharding, exposed)
    bindings = Bindings()

    def folded(must_split: bool) -> Folded:
        return fold(
            graph,
            mesh,
            cut,
            prices,
            state,
            bindings,
            must_split=must_split,
            even=plan.framework == "jax",
            recompute=stage.recompute.runs_again,
        )

    free = folded(must_split=False)
    own = _choice(free, plan)
    if own is None:
        raise LoweringError(
            f"its decisions are not all among those that the mesh {spread.mesh} leaves open"
        )
    forbidden: tuple[Forbidden, ...] = ()
    if spread.mesh.model_axes:
        best = search(free.problem, searcher="elimination")
        if idle := idle_axes(free.spread(best.choice.tolist())):
            split = folded(must_split=True)
            chosen = _choice(split, plan)
            if chosen is not None:
                extra_s = (best.cost - free.problem.total(own)) / PICOSECONDS
                forbidden = (Forbidden(splits_nothing(idle), extra_s),)
                free, own = split, chosen
    return Revisited(
        plan, graph, cluster, cut, lowered, prices, sharding, time, free, own, forbidden
    )


def splits_nothing(axes: Sequence[str]) -> str:
    """Why the planner has no plan whose ``axes`` are idle."""
    named = " and ".join(axes)
    return f"{named} would split no op, so the ranks along it would all do the same work"


def _priced(
    plan: Plan,
    lowered: Lowered,
    summary: Summary,
    prices: Prices,
    cluster: Cluster,
) -> tuple[Memory, StepTime]:
    """Of the fullest device, and of a step."""
    priced = price_pipeline(plan, lowered, summary, prices, cluster)
    stages, runs, schedule = priced.prices, priced.runs, priced.schedule
    ranks = stages.memory(runs, schedule)
    step = stages.step(runs, schedule, priced.timeline.step_s, priced.timeline.busy_s)
    return max(ranks, key=lambda memory: memory.filled), step


def _choice(folded: Folded, plan: Plan) -> tuple[int, ...] | None:
    """The plan's option at every node; None where one of them is not legal there."""
    choice = [_own(node, plan) for node in folded.nodes]
    return None if None in choice else tuple(i for i in choice if i is not None)


def _own(node: Node, plan: Plan) -> int | None:
    """Which of a node's options the plan has chosen."""
    spread = plan.spreads[plan.stages[0].spread]
    if node.kind == "op":
        chosen = spread.ops.get(node.key, "whole")
    else:
        decisions = spread.shared if node.kind == "shared" else spread.parameters
        chosen = decisions.get(node.key, "R")
    options = node.options
    return options.index(chosen) if chosen in options else None
