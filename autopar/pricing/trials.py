"""Many cuts and layouts of one schedule at once: their steps, and the memory of their ranks.

What `PipelinePrices` says of one plan, for columns of figures, by the clock of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.nouns.cluster import Device
from autopar.pipeline.actions import Schedule
from autopar.pricing.memory import overhead
from autopar.pricing.pipeline import Figure, clocked, runs_of
from autopar.pricing.runs import Table
from autopar.pricing.sends import Ends, Order, Sends


@dataclass(frozen=True, slots=True)
class Trial:
    """step_s: the timeline and the slowest rank's optimizer; filled: of its device's memory, what
    the fullest rank needs; chosen: of every stage of the schedule, which of what it may choose."""

    ends: Ends
    step_s: float
    filled: float
    chosen: tuple[int, ...]


def figures_at(tables: Table, ends: Ends, schedule: Schedule, kinds: Sequence[int]) -> Table:
    """[figures, stages] of a cut, from those of all runs on devices of every kind [kinds, figures,
    units + 1, units + 1]. ``kinds``: of every pipeline rank."""
    first, end = zip(*runs_of(ends, schedule), strict=True)
    return tables[[kinds[rank] for rank in schedule.ranks], :, first, end].T


def trials(
    order: Order,
    sends: Sends,
    cuts: Sequence[Ends],
    figures: Sequence[Sequence[Table]],
    devices: Sequence[Device],
    packages: frozenset[str],
) -> list[Trial]:
    """One trial for each cut.

    figures:  for everything that a rank may choose, the fastest first, of each cut its
              `figures_at`: each rank takes the first that its device holds, or the last.
    devices:  of every pipeline rank.
    packages: installed ones that the model's code lies in.
    """
    schedule = order.schedule
    on_rank = np.zeros((len(schedule.lists), len(schedule.ranks)))
    on_rank[list(schedule.ranks), range(len(schedule.ranks))] = 1.0
    outside = [overhead(packages, device) for device in devices]
    share, process = (np.array(column)[:, None] for column in zip(*outside, strict=True))
    limits = np.array([device.memory_bytes for device in devices])[:, None]
    sent = sends.between(cuts)
    peaks = order.clock(sent.skips).peaks
    # [choices, figures, stages, columns], and what each rank would need under each.
    every = np.stack([np.stack(of, axis=-1) for of in figures])
    needed = np.stack(
        [
            (1 + share)
            * (
                peaks(columns[Figure.SAVED], columns[Figure.PENDING])
                + (on_rank[..., None] * columns[Figure.PASSING]).max(axis=1)
                + on_rank @ columns[Figure.STATE]
            )
            + process
            for columns in every
        ]
    )
    fits = needed <= limits
    fits[-1] = True
    chosen = fits.argmax(axis=0)  # [ranks, columns]
    of_stage = chosen[list(schedule.ranks)]
    columns = np.take_along_axis(every, of_stage[None, None], axis=0)[0]
    filled = (np.take_along_axis(needed, chosen[None], axis=0)[0] / limits).max(axis=0).tolist()
    _, times = clocked(order, columns, sent)
    step_s = (times.step_s + (on_rank @ columns[Figure.UPDATE]).max(axis=0)).tolist()
    of_cut = map(tuple, of_stage.T.tolist())
    return [Trial(*priced) for priced in zip(cuts, step_s, filled, of_cut, strict=True)]
