"""The best sharding of all ops for one candidate mesh: one problem, posed and solved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.lowering import routed_pieces
from autopar.lowering.lowered import Lowered
from autopar.lowering.pieces import every_site, with_pieces
from autopar.lowering.routed_pieces import with_expert_pieces
from autopar.lowering.shared_experts import with_beside
from autopar.lowering.spread import lower
from autopar.nouns.plan import Spread
from autopar.nouns.prefetch import USUAL
from autopar.nouns.problem import NoFeasibleAnswer
from autopar.nouns.recompute import KEEP_ALL
from autopar.nouns.solution import Solution
from autopar.planner.ask.candidates import Candidate, StateLayout
from autopar.planner.ask.question import Decided, Question
from autopar.planner.problem.folding import pose
from autopar.planner.problem.legal import NoStrategy
from autopar.planner.problem.nodes import Folded
from autopar.planner.problem.posed import LeastShares, Posed, least_shares, least_used
from autopar.planner.problem.solving import Solver
from autopar.pricing import op_prices
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Cuts
from autopar.pricing.prices import PICOSECONDS
from autopar.pricing.state import StateSharding
from autopar.pricing.state_prices import StatePrices
from autopar.pricing.summary import Summary, summarise
from autopar.pricing.tp_pieces import chosen
from autopar.rules.strategies import DEFER, NOTHING, PASS_PARTIAL, Strategy

HOLDS_MORE = 1.25
"""Times the least that ranks may hold, above which a lean sharding is looked for."""
MORE = 0.1
"""Of what the fastest sharding holds more than the least, what one that holds little may."""


@dataclass(frozen=True, slots=True)
class Charged:
    """What a problem charges for the model state of a layout: ``exposed`` is the share of its
    traffic that compute does not hide; ``adds``: adding gradients to those of the microbatches
    before."""

    layout: StateLayout
    exposed: float
    adds: bool = True


def hidden(data: int, adds: bool = True) -> Charged:
    """What bounds every layout of ``data`` ranks from below: on one data axis they share the
    optimizer's step, no block runs again, and all traffic of state is hidden."""
    return Charged(StateLayout(1, data, 1, KEEP_ALL), 0.0, adds)


@dataclass(frozen=True)
class Solved:
    """A candidate's optimum.

    posed:  the candidate's problem, to be charged for other layouts.
    spread: on one data axis; `decided` puts it on those of a layout.
    model:  prices every layout of the candidate.
    """

    candidate: Candidate
    posed: Posed
    folded: Folded
    solution: Solution
    spread: Spread
    model: CutModel

    def decided(self, candidate: Candidate, layout: StateLayout) -> Decided:
        """Its decisions for a candidate of the same model axes and samples in a microbatch: what
        splits an op depends neither on data axes nor on how often it runs."""
        spread = replace(self.spread, mesh=layout.mesh(candidate.model))
        return Decided(candidate, layout, spread, self.solution.found_by)

    @property
    def summary(self) -> Summary:
        return self.model.summary

    @property
    def bound_s(self) -> float:
        return max(self.solution.lower_bound, 0.0) / PICOSECONDS

    @cached_property
    def least(self) -> LeastShares:
        """Of what it holds, what no sharding can do without."""
        return least_shares(self.folded, self.solution.choice.astype(np.int64))

    @property
    def squeezable(self) -> int:
        """Bytes that other shardings may free."""
        return self.solution.peak - least_used(self.folded.problem)

    @property
    def lean_limit(self) -> int | None:
        """Bytes near the least that any sharding holds; None where this one holds little more."""
        least = least_used(self.folded.problem)
        if self.solution.peak <= HOLDS_MORE * least:
            return None
        return int(least + MORE * (self.solution.peak - least))

    @property
    def repeats(self) -> bool:
        """The model is too small for ranks of a model axis: all do the same work."""
        return bool(idle_axes(self.spread))


def solve(
    question: Question,
    candidate: Candidate,
    solver: Solver,
    charged: Charged | None = None,
    usage_limit: int | None = None,
    posed: Posed | None = None,
) -> Solved | None:
    """The best sharding of all ops for a candidate; None where the model cannot be cut so.

    ``charged``: None for what is `hidden`, so that the optimum is a bound. ``posed``: of the same
    candidate, where that is known.

    A model so small that tensor parallelism costs more than it saves would leave the tp ranks with
    the same work; such an answer is replaced by the best one that splits the products.
    """
    charged = charged or hidden(candidate.data)
    try:
        posed = posed or _posed(question, candidate, solver, must_split=False)
        folded = charge(question, candidate, posed, charged, usage_limit)
        solution = solver(folded.problem, candidate.name, limited=usage_limit is not None)
        spread = folded.spread(solution.choice.tolist())
        if idle_axes(spread) and not posed.must_split:
            posed = _posed(question, candidate, solver, must_split=True)
            return solve(question, candidate, solver, charged, usage_limit, posed)
    except (NoStrategy, NoFeasibleAnswer):
        return None
    cut = question.cuts.of(candidate.model, candidate.slices)
    binder = solver.bindings.of
    lowered = lower(question.graph, spread, candidate.microbatches, cut, binder=binder)
    lowered = posed.prices.settled(lowered)
    pieces = chosen(posed.prices, every_site(lowered))
    of_experts = op_prices.chosen(posed.prices, routed_pieces.sites(lowered))
    lowered = with_expert_pieces(with_pieces(lowered, pieces), of_experts)
    beside = op_prices.chosen_beside(posed.prices, lowered)
    spread = replace(spread, pieces=pieces, expert_pieces=of_experts, beside=beside)
    lowered = with_beside(lowered, beside)
    summary = summarise(lowered, posed.prices, question.framework)
    model = CutModel(Cuts.of(lowered), summary, posed.prices, question.framework)
    return Solved(candidate, posed, folded, solution, spread, model)


def charge(
    question: Question,
    candidate: Candidate,
    posed: Posed,
    charged: Charged,
    usage_limit: int | None = None,
) -> Folded:
    """A candidate's problem with the state of one layout."""
    state = state_of(question, charged.layout, candidate)
    prices = StatePrices(question.cluster, state, charged.exposed, charged.adds)
    return posed.charged(prices, charged.layout.recompute.runs_again, usage_limit)


def _posed(question: Question, candidate: Candidate, solver: Solver, must_split: bool) -> Posed:
    """The problem of ops and moves. Raises `NoStrategy`."""
    mesh = hidden(candidate.data).layout.mesh(candidate.model)
    full = mesh.timed(candidate.microbatches, candidate.slices)
    works = solver.bindings.works
    return pose(
        question.graph,
        full,
        question.cuts.of(candidate.model, candidate.slices),
        question.prices(full, works),
        solver.bindings,
        must_split,
        not question.uneven,
        # One rank alone is no candidate, but what a sample takes at least.
        question.pins.ep if candidate.ranks > 1 else None,
        question.pins.cp_ring is not None,
        question.pins.etp if candidate.ranks > 1 else None,
    )


def lowered_of(question: Question, decided: Decided) -> Lowered:
    """What follows from the decisions."""
    lowered = unsettled_of(question, decided)
    return question.prices(lowered.mesh).settled(lowered)


def unsettled_of(question: Question, decided: Decided) -> Lowered:
    """The same with recipes that are open as they are."""
    candidate = decided.candidate
    cut = question.cuts.of(candidate.model, candidate.slices)
    return lower(question.graph, decided.spread, candidate.microbatches, cut)


def state_of(question: Question, layout: StateLayout, candidate: Candidate) -> StateSharding:
    return StateSharding(
        layout.zero,
        layout.mesh(candidate.model),
        candidate.passes,
        question.precision,
        question.optimizer,
        question.clips,
        layout.offload,
        question.bucket_bytes,
        question.pins.reduce or "",
        question.all_reduce,
        USUAL if question.pins.prefetch is None else question.pins.prefetch,
        question.narrow_gathers,
        framework=question.framework,
    )


def idle_axes(spread: Spread) -> tuple[str, ...]:
    """The model axes that split no op (``tp:D`` and ``tp:P`` split nothing)."""
    strategies = [Strategy.parse(text) for text in spread.ops.values()]
    return tuple(
        axis
        for axis in spread.mesh.model_axes
        if all(chosen.on(axis) in (NOTHING, DEFER, PASS_PARTIAL) for chosen in strategies)
    )
