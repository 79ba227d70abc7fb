"""What published software does to a whole step: sends that hold stages up, time of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.columns import Number, largest
from autopar.pipeline.actions import Schedule
from autopar.pipeline.clock import Pair
from autopar.pipeline.schedules.steady import SteadyClock
from autopar.pricing.sends import Sent
from autopar.pricing.software.trainer import Trainer
from autopar.pricing.step_time import StepTime

Seconds = tuple[Number, ...]
"""Of a stage, as `PipelinePrices.seconds` has them."""
FORWARD, BACKWARD = 0, 1
"""Places of its two passes."""

HOLDS_ALL = ("gpipe", "breadth-first")
"""Schedules under which a rank holds every microbatch of the step."""
UNDELAYED = 8
"""Devices up to which none of them keeps the others waiting."""


@dataclass(frozen=True, slots=True)
class SteadyOrder:
    """A named schedule of however many microbatches, played for few (`SteadyClock`)."""

    steady: SteadyClock

    @property
    def schedule(self) -> Schedule:
        return self.steady.schedule

    @property
    def microbatches(self) -> int:
        return self.steady.microbatches

    def held(self, saved: Sequence[int]) -> list[int]:
        """The most that each rank holds; ``saved``: of a microbatch, by stage."""
        peaks = self.steady.peaks(np.array(saved, dtype=np.float64)[:, None])[:, 0]
        whole = self.holds_all * self.microbatches / self.schedule.microbatches
        return [round(float(peak) * max(1.0, whole)) for peak in peaks]

    @property
    def holds_all(self) -> bool:
        """Whether a rank holds every microbatch of the step."""
        return self.schedule.name in HOLDS_ALL

    def clock(self, skips: tuple[Pair, ...]) -> SteadyClock:
        """Layers of a transformer send nothing past the next stage."""
        assert not skips, skips
        return self.steady


def gathering(
    trainer: Trainer, schedule: Schedule, each: Sequence[Seconds]
) -> tuple[list[Seconds], Number]:
    """The seconds of stages whose parameters are there when their first microbatch comes, and what
    that takes before all of them: beside compute, only the first stage of each rank waits."""
    hides = trainer.software.dp_overlap
    waits: dict[int, Number] = {}
    for rank, (*_, first_s) in zip(schedule.ranks, each, strict=True):
        if rank not in waits or not hides:
            waits[rank] = waits.get(rank, 0.0) + first_s
    return [(*rest, 0.0) for *rest, _ in each], largest(waits.values())


def blocking(schedule: Schedule, each: Sequence[Seconds], sent: Sent) -> tuple[list[Seconds], Sent]:
    """The seconds of stages that wait for what they send, and nothing that is sent beside them."""
    ranks = schedule.ranks
    rows = [[*row] for row in each]
    for stage, around in schedule.around.items():
        # An activation goes to the next stage, a gradient to the one before.
        for way, other in zip((BACKWARD, FORWARD), around, strict=True):
            if other is not None and ranks[other] != ranks[stage]:
                pair = min(stage, other), max(stage, other)
                rows[stage][way] = rows[stage][way] + float(sent.between(schedule, [pair])[0, 0])
    return [tuple(row) for row in rows], replace(sent, seconds=np.zeros_like(sent.seconds))


def slowed(trainer: Trainer, time: StepTime) -> StepTime:
    """With what a step takes outside its timeline, all devices as slow as the slowest."""
    r, devices = trainer.rates, trainer.layout.device_count
    slow = 1 + r.straggle * np.log2(max(1.0, devices / UNDELAYED))
    total_s = (time.total_s + r.step_s) * slow
    return replace(time, total_s=total_s, other_s=total_s - time.total_s)
