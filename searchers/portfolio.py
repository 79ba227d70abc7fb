"""The default: looks at the shape of the problem and chains the other searchers."""

from __future__ import annotations

from autopar.nouns.problem import Problem, Solution
from autopar.searchers import elimination
from autopar.searchers.run import NO_BUDGET, Budget, Report


def search(
    problem: Problem,
    budget: Budget = NO_BUDGET,
    seed: int = 0,
    progress: Report | None = None,
) -> Solution:
    """For now: elimination."""
    return elimination.search(problem, budget, seed, progress)
