"""Block annealing: large exact moves at a falling temperature, always within memory.

A move picks a ball of variables, takes from it an induced forest (variables that close no cycle),
and minimises exactly over all labels of the forest at once, everything else frozen, by dynamic
programming from the leaves.  Gumbel noise of scale T on the unary costs makes the minimiser nearly
a sample at temperature T (perturb-and-MAP, Papandreou & Yuille 2011; blocks of trees after Hamze &
de Freitas 2004).  What does not fit into memory is taken tree by tree, or not at all.  A share of
the prices on memory that the dual found steers the proposals; it is raised when memory blocks too
many moves and lowered when it blocks few.

Which ball is best differs from problem to problem, and so does luck: several chains with different
balls run side by side (``CHAINS``), and rounds after the first start from the best of them, cooler.
Rounds are hot enough for chains to come to rest in different places: what merging makes of several
good answers is worth more than the last percent of any one.  Temperatures are in units of the cost
per variable of the round's start.  Chains have their own
random numbers and meet only between rounds, so the number of cores changes nothing but the time.
One evaluation is one variable looked at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from autopar.nouns.problem import Ints
from autopar.searchers.arcs import Arcs
from autopar.searchers.chain import Ball, Chain
from autopar.searchers.gather import Lift
from autopar.searchers.model import Floats, Model
from autopar.searchers.run import Run
from autopar.searchers.starts import first_answer, shrunk

EVALUATIONS = 20_000_000  # of one round when there is no budget
HOT, AGAIN, COLD = 0.4, 1.0, 0.003  # temperatures: of the first round, of the others, at their end
CHAINS = (Ball(200, 3.0, 0.02), Ball(1000, 1.0, 0.02), Ball(1000, 3.0, 0.02), Ball(3000, 1.0, 0.0))
SMALL = (Ball(4, 1.0, 0.0), Ball(2, 1.0, 0.0), Ball(12, 1.0, 0.0), Ball(30, 1.0, 0.0))


class Annealer:
    """Chains on one model, and rounds of all of them."""

    def __init__(
        self, run: Run, m: Model, lift: Lift, arcs: Arcs, price: Floats, start: Ints, seed: int
    ) -> None:
        self.run, self.model, self.lift = run, m, lift
        self.best, self.best_cost = start.copy(), m.cost(start)
        self.chains = [Chain(m, arcs, price, start, ball, seed, i) for i, ball in enumerate(CHAINS)]

    def round(self, hot: float, cold: float, evaluations: float, seconds: float) -> list[Ints]:
        """Run every chain from where it stands.

        Returns their best choices, best first, and where each of them came to rest.
        """
        scale = abs(self.best_cost - self.model.constant) / max(self.model.num_vars, 1)
        deadline = time.perf_counter() + min(seconds, self.run.remaining_s)

        def play(chain: Chain) -> int:
            return chain.round(hot * scale, cold * scale, evaluations / len(self.chains), deadline)

        for chain in self.chains:
            chain.stopped = False
        with ThreadPoolExecutor(len(self.chains)) as pool:
            try:
                spent = list(pool.map(play, self.chains))
            finally:  # Ctrl-C arrives here while the chains go on
                for chain in self.chains:
                    chain.stopped = True
                self.take(min(self.chains, key=lambda c: c.best_cost).best)
        ranked = sorted(self.chains, key=lambda c: c.best_cost)
        self.take(ranked[0].best)
        self.run.spend(sum(spent))
        return [c.best for c in ranked] + [c.tree.choice.copy() for c in ranked]

    def take(self, x: Ints) -> None:
        """Keep a choice when it is the best so far."""
        cost = self.model.cost(x)
        if cost < self.best_cost:
            self.best, self.best_cost = x.copy(), cost
            self.run.offer(self.lift(x), "annealing")

    def take_small_blocks(self) -> None:
        for chain, ball in zip(self.chains, SMALL, strict=True):
            chain.ball = ball

    def restart(self) -> None:
        """All chains to the best choice."""
        for chain in self.chains:
            chain.restart(self.best)


def search(run: Run, seed: int) -> None:
    """The dual for prices and a start, then rounds of annealing until the budget is spent."""
    from autopar.searchers.trws import Dual

    ready = shrunk(run)
    if ready is not None:
        m, lift = ready
        dual = Dual(m, run, lift)
        tree = first_answer(run, m, lift, dual.arcs)
        if tree is not None:
            dual.upper, dual.choice = m.cost(tree.choice), tree.choice
        share_s, share = _part(run, 0.15)
        dual.ascend(int(min(600, max(40, share / max(2 * m.num_vars, 1)))), run.wall_s + share_s)
        if dual.choice is not None and not run.closed:
            improve(run, m, lift, dual.arcs, dual.price, dual.choice, seed)


def improve(
    run: Run,
    m: Model,
    lift: Lift,
    arcs: Arcs,
    price: Floats,
    start: Ints,
    seed: int,
    between: Callable[[Annealer, list[Ints]], None] | None = None,
    rounds: int = 5,
) -> None:
    """One hot round, then cooler ones from the best; ``between`` may improve on it in between.

    How hot follows from what is known: where the bound is near, the start is good.  A round that
    finds nothing is followed by a warmer one of small blocks.
    """
    annealer = Annealer(run, m, lift, arcs, price, start, seed)
    gap = (annealer.best_cost - run.lower_bound) / max(abs(annealer.best_cost), 1.0)
    warmth = min(1.0, max(5.0 * gap, 0.01))
    for r in range(rounds):
        seconds, evaluations = _part(run, 0.45 if r == 0 else 1.0 / (rounds - r + 0.05))
        hot = (HOT if r == 0 else AGAIN) * warmth
        known = annealer.best_cost
        choices = annealer.round(hot, COLD * warmth, evaluations, seconds)
        if annealer.best_cost == known:  # where memory is tight, it blocks most large blocks
            annealer.take_small_blocks()
            warmth = min(1.0, 2.0 * warmth)
        if between is not None:
            between(annealer, choices)
        if run.closed:
            return
        annealer.restart()


def _part(run: Run, share: float) -> tuple[float, float]:
    """A share of what is left: seconds, evaluations (inf when the clock decides)."""
    if run.budget.evaluations is not None:
        return run.remaining_s, share * run.remaining_evaluations
    if run.budget.wall_s is not None:
        return share * run.remaining_s, math.inf
    return math.inf, float(EVALUATIONS)
