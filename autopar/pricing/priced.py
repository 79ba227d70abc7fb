"""The price of one layout of a model that was lowered on its model axes alone.

Data axes, microbatches, state sharding, recompute, schedule and cuts change nothing of what a rank
does to one microbatch: one `CutModel` prices every layout that has its model axes and its samples
in a microbatch, and keeps what stages of equal layers take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.cost_models.physics import broken
from autopar.nouns.prediction import Memory
from autopar.nouns.recompute import Recompute
from autopar.pipeline.schedules.one_way import one_f_one_b
from autopar.pricing.bounds import pipeline_bounds
from autopar.pricing.cut_model import CutModel
from autopar.pricing.pipeline import PipelinePrices, runs_of
from autopar.pricing.sends import Ends, Order
from autopar.pricing.state import StateSharding
from autopar.pricing.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Priced:
    """memory: of the fullest device, and of the fullest host; alarm: what of its figures cannot be,
    and so none is to be trusted."""

    time: StepTime
    memory: Memory
    alarm: str = ""


def price(model: CutModel, state: StateSharding, recompute: Recompute) -> Priced:
    """A step of ``state.microbatches`` of a model that is one stage, on its own cluster."""
    stages = PipelinePrices(model, model.prices.cluster, state, recompute, 1)
    return priced(stages, alone(state.microbatches), (len(model.units),))


def priced(
    stages: PipelinePrices, order: Order, ends: Ends, state: tuple[int, int] | None = None
) -> Priced:
    """These stages under this schedule; ``state``: bytes that ranks must hold together."""
    runs = runs_of(ends, order.schedule)
    ranks = stages.memory(runs, order.schedule)
    time = stages.step(runs, order.schedule, *stages.clocked(runs, order))
    memory = max(ranks, key=lambda rank: rank.total / rank.limit)
    hosted = max(ranks, key=lambda rank: rank.host / max(1, rank.host_limit))
    memory = replace(memory, host=hosted.host, host_limit=hosted.host_limit)
    each = stages.state.mesh.device_count
    return Priced(time, memory, broken(pipeline_bounds(ranks, each, state)) if state else "")


@lru_cache(maxsize=256)
def alone(microbatches: int) -> Order:
    """That of a model that is one stage."""
    return Order(one_f_one_b(1, microbatches, 1))
