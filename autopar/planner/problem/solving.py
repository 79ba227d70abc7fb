"""Solving one problem of the planner: which searcher, how long, what the person who waits sees.

Exact searchers run until they have proven their answer. The others stop after a fixed number of
evaluations per node, so that plans do not depend on the clock. Under a memory limit every searcher
has such a budget. Ctrl-C ends a search with the best choice so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.nouns.problem import Problem
from autopar.nouns.solution import Solution
from autopar.planner.problem.bindings import Bindings
from autopar.pricing.prices import PICOSECONDS
from autopar.searchers import SEARCHERS, Budget, Progress
from autopar.searchers import search as solve

INEXACT = 400
"""Evaluations per node of a searcher that proves nothing (or, `brute_force`, never ends)."""
SQUEEZES = 60
"""Evaluations per node of an exact searcher under a memory limit."""
EVERY_S = 1.0
"""Seconds between two lines of progress."""

Tell = Callable[[str], None]


@dataclass(slots=True)
class Solver:
    """``searcher`` by name; ``verbose`` tells every step of it, not one a second."""

    searcher: str
    tell: Tell = lambda _: None
    verbose: bool = False
    interrupted: bool = False
    bindings: Bindings = field(default_factory=Bindings)
    """What all problems of one search share."""

    def __call__(self, problem: Problem, name: str, limited: bool) -> Solution:
        """The answer to ``problem``, called ``name`` in progress; ``limited``: memory is.

        Raises `NoFeasibleAnswer`, and KeyboardInterrupt where there is no answer yet.
        """
        line = _Line(self, name)
        solution = solve(problem, self.searcher, self._budget(problem, limited), progress=line)
        if solution.interrupted:
            self.interrupted = True
            solution = replace(solution, found_by=f"{solution.found_by}, interrupted")
        return solution

    def check(self) -> None:
        """Raises KeyboardInterrupt once a search has been interrupted."""
        if self.interrupted:
            raise KeyboardInterrupt

    def _budget(self, problem: Problem, limited: bool) -> Budget:
        row = SEARCHERS.get(self.searcher)
        if row is not None and (not row.exact or row.name == "brute_force"):
            return Budget(evaluations=INEXACT * problem.num_nodes)
        return Budget(evaluations=SQUEEZES * problem.num_nodes if limited else None)


@dataclass(slots=True)
class _Line:
    """Tells how one search goes on."""

    solver: Solver
    name: str
    last: float = field(default_factory=lambda: time.monotonic())

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if self.solver.verbose or now - self.last >= EVERY_S:
            self.last = now
            self.solver.tell(f"{self.name}: {_text(progress)}")


def _text(progress: Progress) -> str:
    parts = []
    if progress.cost is not None:
        parts.append(f"best {progress.cost / PICOSECONDS * 1e3:.6g} ms")
    if math.isfinite(progress.lower_bound):
        parts.append(f"bound {progress.lower_bound / PICOSECONDS * 1e3:.6g} ms")
    if progress.cost and math.isfinite(progress.lower_bound):
        parts.append(f"gap {(progress.cost - progress.lower_bound) / progress.cost:.2%}")
    parts.append(f"{progress.wall_s:.1f} s")
    if progress.note:
        parts.append(progress.note)
    return ", ".join(parts)
