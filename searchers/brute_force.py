"""Every choice, one after the other: the referee for the other searchers.

    min over x in X_1 x ... x X_n with allowed(x) and peak(x) <= limit of total(x)

Nothing here is shared with the other searchers but the exact evaluator.  An evaluation is one
choice looked at, times the number of nodes.
"""

from __future__ import annotations

import itertools

from autopar.searchers.run import Run


def search(run: Run, seed: int) -> None:
    """Try the whole product of strategies; exact, and exponential in the number of nodes."""
    del seed
    for choice in itertools.product(*map(range, run.problem.num_strategies.tolist())):
        run.offer(choice)
        run.spend(run.problem.num_nodes)
    run.bound(float("inf") if run.cost is None else float(run.cost))
