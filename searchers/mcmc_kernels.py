"""The compiled loop of ``mcmc``; imported only when it is needed."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import numpy as np

from autopar.searchers.annealing_kernels import uniform
from autopar.searchers.memory_kernels import change_label, jit


@jit
def metropolis(arcs, unary, memory, best, cost, best_cost, hot, cold, moves, state):
    """Propose one random label of one random variable; accept by Metropolis' rule if it fits."""
    start, x, tree = arcs.start, memory.choice, memory.tree
    n = len(start) - 1
    for move in range(moves):
        heat = hot * (cold / hot) ** (move / moves)
        v = np.int64(uniform(state) * n)
        label = np.int64(uniform(state) * (start[v + 1] - start[v]))
        threshold = -heat * np.log(1.0 - uniform(state))
        old = x[v]
        if label == old:
            continue
        delta = change_label(arcs, unary, memory, v, label)
        if delta > threshold or tree[1] > 0.0:
            change_label(arcs, unary, memory, v, old)
            continue
        cost += delta
        if cost < best_cost - 1e-9 * abs(best_cost):
            best_cost = cost
            best[:] = x
    return cost, best_cost
