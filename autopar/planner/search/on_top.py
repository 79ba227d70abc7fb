"""What the program of a plan does on top of its layout, once that is settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.planner.ask.question import Outcome, Question
from autopar.planner.search.buckets import sums_of
from autopar.planner.search.kernels import kernels_run
from autopar.planner.search.prefetch import prefetched
from autopar.planner.search.recipes import taken_recipes
from autopar.planner.search.reductions import reduce_dtype_of
from autopar.planner.solve.solved import lowered_of
from autopar.rules.kernels import only_kernels
from autopar.rules.narrow import only_recipes


@dataclass(frozen=True, slots=True)
class OnTop:
    """The choices, and what follows from them.

    decisions: fields of its plan. ``question``: with what they leave open settled, of which
    ``searched`` still has recipes. ``outcome``: at the price of all of them.
    """

    decisions: Mapping[str, Any]
    question: Question
    searched: Question
    outcome: Outcome


def chosen(question: Question, outcome: Outcome) -> OnTop:
    """Raises `LayoutError` where something is pinned that has no effect."""
    decided = outcome.best.decided
    recipes = taken_recipes(question, decided)
    kernels = kernels_run(question.graph, lowered_of(question, decided), question.pins)
    searched = replace(question, graph=only_kernels(question.graph, kernels))
    question = replace(searched, graph=only_recipes(searched.graph, recipes))
    outcome, prefetch = prefetched(question, outcome)
    sums = sums_of(question, decided)
    decisions = {
        "bucket_bytes": sums.bucket_bytes,
        "all_reduce": sums.all_reduce,
        "reduce_dtype": reduce_dtype_of(question, decided),
        "prefetch": prefetch,
        "kernels": kernels,
        "recipes": recipes,
    }
    return OnTop(decisions, question, searched, outcome)
