"""Many cuts and layouts of one schedule at once: their steps, and the memory of their ranks.

What `PipelinePrices` says of one plan, for columns of figures, by the clock of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.nouns.cluster import Device
from autopar.pipeline.actions import Schedule
from autopar.planner.pricing.memory import overhead
from autopar.planner.pricing.pipeline import Figure, clocked
from autopar.planner.pricing.runs import Table
from autopar.planner.pricing.sends import Ends, Order, Sends


@dataclass(frozen=True, slots=True)
class Trial:
    """step_s: the timeline and the slowest rank's optimizer; memory_bytes: of the fullest rank."""

    ends: Ends
    step_s: float
    memory_bytes: float


def figures_at(table: Table, ends: Ends, schedule: Schedule) -> Table:
    """[figures, stages] of a cut, from those of all runs."""
    parts = table[:, [0, *ends[:-1]], list(ends)]
    return parts[:, [schedule.part[stage] for stage in range(len(schedule.ranks))]]


def trials(
    order: Order,
    sends: Sends,
    cuts: Sequence[Ends],
    figures: Sequence[Table],
    device: Device,
    packages: frozenset[str],
) -> list[Trial]:
    """One trial for each cut with its `figures_at`.

    packages: installed ones that the model's code lies in.
    """
    schedule = order.schedule
    on_rank = np.zeros((len(schedule.lists), len(schedule.ranks)))
    on_rank[list(schedule.ranks), range(len(schedule.ranks))] = 1.0
    share, process = overhead(packages, device)
    skips, sent = sends.between(cuts)
    columns = np.stack(figures, axis=-1)  # [figures, stages, columns]
    clock, times = clocked(order, columns, sent, skips)
    passing = (on_rank[..., None] * columns[Figure.PASSING]).max(axis=1)
    held = clock.peaks(columns[Figure.SAVED])
    allocated = held + passing + on_rank @ columns[Figure.STATE]
    memory = ((1 + share) * allocated + process).max(axis=0).tolist()
    step_s = (times.step_s + (on_rank @ columns[Figure.UPDATE]).max(axis=0)).tolist()
    return [Trial(*priced) for priced in zip(cuts, step_s, memory, strict=True)]
