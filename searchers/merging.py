"""Solution merging (after Blum et al. 2016): the best combination of what several searches chose.

The model is restricted to the labels that one of them chose, and to those of small reduced cost in
the dual; what is left is small enough for the integer program.
"""

from __future__ import annotations

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers import integer_program
from autopar.searchers.annealing import Annealer
from autopar.searchers.gather import Lift, composed, keep_labels
from autopar.searchers.model import Floats
from autopar.searchers.run import Budget, Run
from autopar.searchers.shrink import shrink_model
from autopar.searchers.starts import SHRINK_SHARE
from autopar.searchers.trws import Dual

CORE = 100_000  # edge cells of a merged model that is worth an integer program
UNSHRUNK = 40  # times that, before shrinking


class Merge:
    """Solution merging: the best of all combinations of what the chains chose."""

    def __init__(self, run: Run, dual: Dual, lift: Lift, seed: int, shrinking_s: float) -> None:
        self.run, self.dual, self.lift, self.seed = run, dual, lift, seed
        self.shrinking_s = shrinking_s  # what the whole problem took; a merged one takes less
        self.fraction = 0.1  # of the gap, that a label's reduced cost may be
        self.best: Ints | None = None
        self._reduced: Floats | None = None

    def __call__(self, annealer: Annealer, choices: list[Ints]) -> None:
        better = self.solve(choices, annealer.best)
        if better is not None:
            annealer.take(better)

    def solve(self, choices: list[Ints], known: Ints) -> Ints | None:
        """The best choice of the restricted model, if it is better than the one known."""
        m, run = self.dual.model, self.run
        if run.remaining_s < self.shrinking_s:
            return None
        gap = max(m.cost(known) - self.dual.bound, 0.0)
        while True:
            keep = self.reduced() <= self.fraction * gap
            for x in choices:
                keep[m.start[:-1] + x] = True
            left = np.add.reduceat(keep, m.start[:-1], dtype=np.int64)
            cells = int((left[m.edge[:, 0]] * left[m.edge[:, 1]]).sum())
            if cells > UNSHRUNK * CORE and self.fraction >= 1e-4:
                self.fraction /= 2.0
                continue
            run.tick()
            fewer, back = keep_labels(m, keep)
            smaller, further = shrink_model(fewer, enough=run.spent(SHRINK_SHARE))
            excess = len(smaller.edge_cost) / CORE
            if excess <= 1.0 or self.fraction < 1e-4:
                break
            self.fraction /= 2.0 if excess < 2.0 else 8.0
        back = composed(back, further)
        run.report(f"merging {int(keep.sum())} labels: {len(smaller.edge_cost)} cells")
        if len(smaller.edge_cost) > 3 * CORE:
            return None
        cost = m.cost(known)
        best: list[Ints] = []

        def offer(x: Ints) -> None:
            nonlocal cost
            choice = back(x)
            if m.cost(choice) < cost and m.fits(choice):
                cost = m.cost(choice)
                self.best = choice
                best.append(choice)
                run.offer(self.lift(choice), "merging")

        wall_s = None if run.budget.wall_s is None else run.share_s(0.2)
        limited = run.budget.evaluations is not None
        evaluations = int(run.remaining_evaluations) if limited else None
        part = Run(run.problem, Budget(evaluations, wall_s), "merging")
        ended = False
        with part:
            ended = integer_program.solve(
                part, smaller, composed(self.lift, back), self.dual.busy_rows(smaller),
                proves=False, seed=self.seed, offer=offer,
            )  # fmt: skip
        if part.interrupted:
            raise KeyboardInterrupt
        run.spend(part.evaluations)
        self.fraction *= 2.0 if ended else 0.5
        return best[-1] if best else None

    def reduced(self) -> Floats:
        if self._reduced is None:
            self._reduced = self.dual.reduced_costs()
        return self._reduced
