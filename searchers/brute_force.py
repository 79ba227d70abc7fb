"""Every choice of strategies that are allowed, one after the other: the referee for the others.

    min over x in X_1 x ... x X_n with allowed(x) and peak(x) <= limit of total(x)

Nothing here is shared with the other searchers but the exact evaluator.  An evaluation is one
choice looked at, times the number of nodes.
"""

from __future__ import annotations

import itertools

import numpy as np

from autopar.nouns.problem import FORBIDDEN
from autopar.searchers.run import Run


def search(run: Run, seed: int) -> None:
    """Try the whole product of strategies; exact, and exponential in the number of nodes."""
    del seed
    p = run.problem
    nodes = np.split(p.cost < FORBIDDEN, p.strategy_start[1:-1]) if p.num_nodes else []
    for choice in itertools.product(*(np.flatnonzero(allowed).tolist() for allowed in nodes)):
        run.offer(choice)
        run.spend(p.num_nodes)
    run.bound(float("inf") if run.cost is None else float(run.cost))
