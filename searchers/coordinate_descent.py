"""Block coordinate descent: from a greedy choice, ever better blocks, until none helps.

The choice is made variable by variable and repaired to fit into memory.  Then blocks of variables
(induced forests in growing balls, see ``annealing``) are minimised exactly with everything else
frozen, at temperature zero, so cost never rises.  When a whole round of blocks finds nothing, the
choice is a minimum of that neighbourhood and the search restarts from a perturbed one (iterated
local search, Lourenco, Martin & Stuetzle 2003).  One evaluation is one variable looked at.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.searchers.chain import BLOCK, ZERO, Chain
from autopar.searchers.run import Run
from autopar.searchers.starts import prepare

ROUNDS = 12  # perturbations when there is no budget
MOVES = 20  # blocks per variable and round
KICK = 0.3  # temperature of a perturbation, in units of the cost per variable


def search(run: Run, seed: int) -> None:
    """See the module."""
    ready = prepare(run)
    if ready is None:
        return
    m, lift, layout, tree = ready
    unit = max(abs(m.cost(tree.choice) - m.constant), 1.0) / m.num_vars
    chain = Chain(m, layout, np.zeros(len(m.room)), tree.choice, BLOCK, seed, 0)
    endless = run.budget.wall_s is not None or run.budget.evaluations is not None
    kicks = 0
    while (endless or kicks < ROUNDS) and not run.closed:
        before = chain.best_cost
        limit = run.remaining_evaluations * chain.moves_per_evaluation
        limit = min(limit, max(run.remaining_s, 0.05) * chain.moves_per_second)
        moves = max(1, int(min(MOVES * m.num_vars, limit)))
        spent = chain.go(moves, ZERO * unit, ZERO * unit)
        run.offer(lift(chain.best), f"after {kicks} kicks")
        run.spend(spent)
        if chain.best_cost >= before - 1e-9 * abs(before) or math.isinf(before):
            kicks += 1
            chain.restart(chain.best)
            run.spend(chain.go(max(1, m.num_vars // 100), KICK * unit, KICK * unit))
