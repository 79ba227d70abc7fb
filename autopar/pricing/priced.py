"""The price of one layout of a model that was lowered on its model axes alone.

Data axes, microbatches, state sharding, recompute, schedule and cuts change nothing of what a rank
does to one microbatch: one `CutModel` prices every layout that has its model axes and its samples
in a microbatch, and keeps what stages of equal layers take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.nouns.plan import Memory
from autopar.nouns.recompute import Recompute
from autopar.pipeline.schedules.one_way import one_f_one_b
from autopar.pricing.cut_model import CutModel
from autopar.pricing.pipeline import PipelinePrices, runs_of
from autopar.pricing.sends import Ends, Order
from autopar.pricing.state import StateSharding
from autopar.pricing.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Priced:
    """memory: of the rank that needs most. first_s: of the first gathers of all stages, which come
    one after the other. reduce_s: of the rank whose last gradients take longest."""

    time: StepTime
    memory: Memory
    first_s: float = 0.0
    reduce_s: float = 0.0


def price(
    model: CutModel,
    state: StateSharding,
    recompute: Recompute,
    order: Order | None = None,
    ends: Ends = (),
) -> Priced:
    """A step of ``state.microbatches`` on the cluster of ``model``. order: the schedule of a
    pipeline that is cut at ``ends``; None: one stage."""
    order = order or alone(state.microbatches)
    pp = len(order.schedule.lists)
    stages = PipelinePrices(model, model.prices.cluster, state, recompute, pp)
    return priced(stages, order, ends or (len(model.units),))


def priced(stages: PipelinePrices, order: Order, ends: Ends) -> Priced:
    """These stages under this schedule."""
    runs = runs_of(ends, order.schedule)
    time = stages.step(runs, order.schedule, *stages.clocked(runs, order))
    ranks = stages.memory(runs, order.schedule)
    each = [stages.at(i).time(*run) for i, run in enumerate(runs)]
    reduced = [0.0] * len(ranks)
    for rank, one in zip(order.schedule.ranks, each, strict=True):
        reduced[rank] += one.reduce_s
    fullest = max(ranks, key=lambda rank: rank.total)
    return Priced(time, fullest, sum(one.first_s for one in each), max(reduced))


@lru_cache(maxsize=256)
def alone(microbatches: int) -> Order:
    """That of a model that is one stage."""
    return Order(one_f_one_b(1, microbatches, 1))
