"""What the program of a plan does on top of its layout, once that is settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.nouns.imbalance import Imbalance
from autopar.planner.ask.question import Outcome, Question
from autopar.planner.search.buckets import sums_of
from autopar.planner.search.expert_placement import placed_experts
from autopar.planner.search.gathers import gather_dtype_of
from autopar.planner.search.kernels import kernels_run
from autopar.planner.search.prefetch import prefetched
from autopar.planner.search.recipes import taken_recipes
from autopar.planner.search.reductions import reduce_dtype_of
from autopar.planner.search.scatters import scatters_of
from autopar.planner.solve.solved import lowered_of
from autopar.rules.kernels import only_kernels
from autopar.rules.narrow import only_recipes


@dataclass(frozen=True, slots=True)
class OnTop:
    """The choices, and what follows from them.

    decisions: fields of its plan. ``question``: with what they leave open settled, of which
    ``searched`` still has recipes, and experts as the search takes them to lie. ``outcome``: at the
    price of all of them. ``placing_saves_s``: of its step, placing experts by their rows.
    """

    decisions: Mapping[str, Any]
    question: Question
    searched: Question
    outcome: Outcome
    placing_saves_s: float = 0.0


def chosen(question: Question, outcome: Outcome, imbalance: Imbalance | None = None) -> OnTop:
    """``imbalance``: of routes to experts. Raises `LayoutError` where something is pinned that has
    no effect."""
    decided, as_searched = outcome.best.decided, question.graph
    placed = placed_experts(question, outcome, imbalance)
    question, outcome = placed.question, placed.outcome
    recipes = taken_recipes(question, decided)
    kernels = kernels_run(question.graph, lowered_of(question, decided), question.pins)
    searched = replace(question, graph=only_kernels(as_searched, kernels))
    question = replace(question, graph=only_kernels(question.graph, kernels))
    question = replace(question, graph=only_recipes(question.graph, recipes))
    outcome, prefetch = prefetched(question, outcome)
    sums = sums_of(question, decided)
    decisions = {
        "bucket_bytes": sums.bucket_bytes,
        "all_reduce": sums.all_reduce,
        "reduce_dtype": reduce_dtype_of(question, decided),
        "scatters": scatters_of(question, decided),
        "prefetch": prefetch,
        "kernels": kernels,
        "recipes": recipes,
        "gather_dtype": gather_dtype_of(question, decided),
        "expert_placement": placed.placement,
    }
    return OnTop(decisions, question, searched, outcome, placed.saved_s)
