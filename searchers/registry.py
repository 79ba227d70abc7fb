"""The searchers by name, in the order in which a reader should meet them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from autopar.nouns.problem import Problem, ProblemError
from autopar.nouns.solution import Solution
from autopar.searchers.run import NO_BUDGET, Budget, Report, Run


@dataclass(frozen=True)
class Searcher:
    """A row of the table: ``exact`` searchers prove their answer when the budget lets them end."""

    name: str
    exact: bool
    good_for: str

    def __call__(
        self, problem: Problem, budget: Budget, seed: int, progress: Report | None
    ) -> Solution:
        # Imported on use: several need libraries that take a while to load.
        module = import_module(f"autopar.searchers.{self.name}")
        with Run(problem, budget, self.name, progress) as run:
            module.search(run, seed)
        if run.choice is None:
            from autopar.searchers.least_limit import explain

            if (error := explain(run)) is not None:
                raise error
        return run.solution()


SEARCHERS = {
    s.name: s
    for s in (
        Searcher("brute_force", True, "a handful of nodes; the referee"),
        Searcher("portfolio", True, "the default: looks at the problem and chains the others"),
        Searcher("coordinate_descent", False, "a good answer at once, for any size"),
        Searcher("mcmc", False, "the yardstick for the stochastic searchers"),
        Searcher("mcts", False, "decisions that a person can read; needs no narrow graph"),
        Searcher("annealing", False, "thousands of variables"),
        Searcher("integer_program", True, "a few hundred variables with a memory limit that bites"),
        Searcher("elimination", True, "narrow graphs: blocks of real models"),
    )
}


def search(
    problem: Problem,
    searcher: str = "portfolio",
    budget: Budget = NO_BUDGET,
    seed: int = 0,
    progress: Report | None = None,
) -> Solution:
    """Solve a problem with the searcher of that name.

    Raises NoFeasibleAnswer when there is no answer, because the problem has none or because the
    search ended before it found one, which the message tells apart, and ProblemError for an unknown
    searcher.  Ctrl-C returns the best answer so far, marked ``interrupted``.
    """
    if searcher not in SEARCHERS:
        raise ProblemError(f"no searcher {searcher!r}; there are {', '.join(SEARCHERS)}")
    return SEARCHERS[searcher](problem, budget, seed, progress)
