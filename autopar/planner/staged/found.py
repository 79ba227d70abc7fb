"""Schedules made for one model: lists found with its own times, under a memory limit.

The cut is that of a one-way pipeline. Its stages are one a rank, or two in a V. List scheduling
(`autopar.pipeline.greedy`) gives the lists, refined where they are small
(`autopar.pipeline.refine`). How many microbatches a rank may hold is tried in a few steps, from
what 1F1B holds to all; which of them fit is for the price to say. Schedules by name take part too,
so that what is found is never slower than they are.
"""

from __future__ import annotations

import numpy as np

from autopar.nouns.cluster import Cluster
from autopar.pipeline.actions import Action, Schedule, ScheduleError, one_route
from autopar.pipeline.cuts import NoCuts, cut
from autopar.pipeline.greedy import Setting, shortest
from autopar.pipeline.refine import FEW, refined
from autopar.planner.staged.pipeline_models import Model
from autopar.planner.staged.shapes import Core
from autopar.pricing.pipeline import Figure, clocked
from autopar.pricing.sends import Order, Sends
from autopar.pricing.trials import figures_at

FOUND = "found"
VEE = 2
"""Stages a rank that form a V."""
MOST = 20_000
"""Actions of a step that lists are found for."""
NAMED = ("1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""Schedules by name that compete with lists that are found."""


def limits(pp: int, microbatches: int) -> list[int]:
    """Microbatches that a rank may hold, to be tried."""
    return sorted({min(n, microbatches) for n in (pp, pp * 3 // 2, 2 * pp, microbatches)})


def found_order(core: Core, model: Model, cluster: Cluster, sends: Sends) -> Order:
    """Raises `ScheduleError` where there is none, with what stands against it."""
    pp, m = core.shape.pp, core.shape.candidate.passes
    stages = pp * core.depth
    split = not core.lightest.runs_again
    if (2 + split) * stages * m > MOST:
        raise ScheduleError(
            f"schedule=found looks for the order of at most {MOST:,} actions, and {stages} stages "
            f"with {m} microbatches have {(2 + split) * stages * m:,}: give --fix microbatch= "
            "with more samples, or take a schedule by name, such as zb-v"
        )
    once = [*range(pp)]
    ranks = once + once[::-1] if core.depth == VEE else once * core.depth
    views = core.shape.views(cluster)
    distinct = [*dict.fromkeys(views)]
    kinds = [distinct.index(view) for view in views]
    tables = np.stack([model.plain(core.lightest, view) for view in distinct])
    each = [*(tables[:, Figure.FORWARD] + tables[:, Figure.BACKWARD])]
    busy = [each[kinds[rank]] for rank in ranks]
    try:
        ends = cut(busy, busy, m).ends
    except NoCuts as error:
        raise ScheduleError(str(error)) from None
    sent = sends.between([ends])
    own = one_route(FOUND, tuple(ranks), ((),) * pp, m)
    took = figures_at(tables, ends, own, kinds)
    forward, backward, weights = took[: Figure.WEIGHTS + 1].tolist()

    def time_s(action: Action) -> float:
        stage, kind = action.stage, action.kind
        if kind == "F":
            return float(forward[stage])
        if kind == "W":
            return float(weights[stage])
        return float(backward[stage] - (weights[stage] if kind == "I" else 0.0))

    def send_s(a: int, b: int) -> float:
        return float(sent.between(own, [(min(a, b), max(a, b))])[0, 0])

    def step_s(made: Schedule) -> float:
        figures = figures_at(tables, ends, made, kinds)[..., None]
        return float(clocked(Order(made), figures, sent)[1].step_s[0])

    limit = [core.limit * core.depth] * pp
    setting = Setting(ranks, [range(stages)], [0] * m, limit, time_s, split)
    made = one_route(FOUND, tuple(ranks), shortest(setting), m)
    if sum(map(len, made.lists)) <= FEW and not sent.skips:
        made = min(made, refined(made, limit, time_s, send_s), key=step_s)
    return Order(made, written=True)
