"""Markov chain Monte Carlo over strategies, one node at a time.

A random label of a random variable is proposed and accepted with probability
min(1, exp(-(increase of cost) / T)), never beyond memory (Metropolis et al. 1953; as a search for
parallel plans: FlexFlow, Jia, Zaharia & Aiken 2019), T falling geometrically.  The simplest of the
stochastic searchers, and the yardstick for the others.  One evaluation is one proposal.
"""

from __future__ import annotations

import time

import numpy as np

from autopar.searchers.run import Run
from autopar.searchers.starts import prepare

EVALUATIONS = 2_000_000  # when there is no budget
HOT, COLD = 1.0, 1e-3  # temperatures, in units of the start's cost per variable
STEPS = 50


def search(run: Run, seed: int) -> None:
    """See the module.  The lower bound is that of the cheapest strategies alone."""
    ready = prepare(run)
    if ready is None:
        return
    from autopar.searchers.mcmc_kernels import metropolis

    m, lift, layout, tree = ready
    best, cost = tree.choice.copy(), m.cost(tree.choice)
    best_cost = cost
    unit = max(abs(cost - m.constant), 1.0) / m.num_vars
    state = np.random.default_rng(seed).integers(1, 2**63, size=1, dtype=np.uint64)
    heats = unit * np.geomspace(HOT, COLD, STEPS + 1)
    rate = 1e5
    for s in range(STEPS):
        if run.closed:
            break
        if run.budget.evaluations is not None:
            moves = int(run.remaining_evaluations / (STEPS - s))
        elif run.budget.wall_s is not None:
            moves = int(rate * run.remaining_s / (STEPS - s))
        else:
            moves = EVALUATIONS // STEPS
        began = time.perf_counter()
        cost, best_cost = metropolis(
            layout, np.minimum(m.unary, 1e250), tree.memory, best, cost, best_cost,
            heats[s], heats[s + 1], max(moves, 1), state,
        )  # fmt: skip
        rate = max(moves, 1) / max(time.perf_counter() - began, 1e-6)
        run.offer(lift(best), f"temperature {heats[s + 1]:.3g}")
        run.spend(max(moves, 1))
