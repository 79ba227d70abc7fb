"""The price of one layout of a model that was lowered on its model axes alone.

Data axes, microbatches, state sharding, recompute, schedule and cuts change nothing of what a rank
does to one microbatch: one `CutModel` prices every layout that has its model axes and its samples
in a microbatch, and keeps what stages of equal layers take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.nouns.plan import Memory
from autopar.nouns.recompute import Recompute
from autopar.pricing.memory import step_memory
from autopar.pricing.pipeline import CutModel, PipelinePrices, runs_of
from autopar.pricing.sends import Ends, Order
from autopar.pricing.simulation import StepTime, simulate
from autopar.pricing.state import StateSharding


@dataclass(frozen=True, slots=True)
class Priced:
    """memory: of the rank that needs most. first_s: of the first gathers of all stages, which come
    one after the other."""

    time: StepTime
    memory: Memory
    first_s: float = 0.0


def price(
    model: CutModel,
    state: StateSharding,
    recompute: Recompute,
    order: Order | None = None,
    ends: Ends = (),
) -> Priced:
    """A step of ``state.microbatches`` on the cluster of ``model``. order: the schedule of a
    pipeline that is cut at ``ends``; None: one stage."""
    cluster = model.prices.cluster
    if order is None:
        summary = replace(model.summary, microbatches=state.microbatches)
        time = simulate(summary, state, cluster, recompute)
        return Priced(time, step_memory(summary, state, recompute, cluster.device))
    pp = len(order.schedule.lists)
    stages = PipelinePrices(model, cluster, state, recompute, pp)
    runs = runs_of(ends, order.schedule)
    time = stages.step(runs, order.schedule, *stages.clocked(runs, order))
    ranks = stages.memory(runs, order.schedule)
    first_s = sum(stages.time(*run).first_s for run in runs)
    return Priced(time, max(ranks, key=lambda rank: rank.total), first_s)
