"""A plan whose strategies are pinned op by op, for comparing one and the same layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch

import numpy as np

from autopar.lowering.spread import lower
from autopar.nouns.problem import FORBIDDEN
from autopar.planner import PlanResult
from autopar.report.revisit import revisit
from autopar.searchers import search


def pin(result: PlanResult, pins: Mapping[str, str]) -> PlanResult:
    """The best plan on the mesh of ``found`` in which ops have the strategies of ``pins``.

    pins: pattern of op keys (``"*attention.q/linear"``) -> strategy (``"tp:n"``). All other ops are
    chosen anew. The prediction stays that of ``found``.

    Raises ValueError for a pattern without an op, or an op without that strategy.
    """
    batch_dims = {e.name: e.batch_dim for e in result.captured.batch if e.batch_dim is not None}
    again = revisit(result.plan, result.cluster, result.graph, batch_dims)
    problem = again.folded.problem
    cost = problem.cost.copy()
    for pattern, wanted in pins.items():
        matching = [
            (i, node)
            for i, node in enumerate(again.folded.nodes)
            if node.kind == "op" and fnmatch(node.key, pattern)
        ]
        if not matching:
            raise ValueError(f"no op is called {pattern}")
        for i, node in matching:
            first, end = problem.strategy_start[i : i + 2]
            keep = node.options.index(wanted)
            cost[first:end] = np.where(np.arange(end - first) == keep, cost[first:end], FORBIDDEN)
    solution = search(replace(problem, cost=cost), searcher="elimination")
    if solution.cost >= FORBIDDEN:
        raise ValueError(f"no plan has {dict(pins)}")
    mesh = result.plan.spreads[0].mesh
    spread = replace(again.folded.spread(solution.choice.tolist()), mesh=mesh)
    lowered = lower(result.graph, spread, result.plan.microbatches, again.cut)
    return replace(result, plan=replace(result.plan, spreads=(spread,)), lowered=lowered)
