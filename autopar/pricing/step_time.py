"""One training step: the timeline of its stages, and what all ranks do once beside it.

Every collective and message is a meeting, where ranks wait for the slowest. The batch's counts are
summed before the first forward, the loss beside the last backward where the model is one stage; the
norm of the gradient, where it is clipped, behind all reductions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.columns import Number, larger, largest
from autopar.lowering.state import StateCollective, count_sums, pipeline_loss_bytes, sums
from autopar.nouns.axes import PIPELINE, SHARD
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.pipeline.actions import Schedule
from autopar.pricing.stage_time import StageTime
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary
from autopar.pricing.units.moves import contention_of, move_time_s


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step and where they go."""

    total_s: float
    forward_s: float
    """Forward passes, with what moves in them."""
    compute_s: float
    model_communication_s: float
    data_communication_s: float
    moved_each_s: float
    """Of data-axis communication what every microbatch asks for."""
    exposed_s: float
    """Data-axis communication that nothing hid, and what ranks of a pipeline are idle."""
    waiting_s: float
    """For the slowest rank, wherever ranks meet."""
    optimizer_s: float
    other_s: float = 0.0
    """That published software takes outside all of it: logging, data, stragglers."""

    @property
    def exposed_share(self) -> float:
        """How much of the data-axis traffic could not be hidden."""
        if self.data_communication_s <= 0:
            return 0.0
        return min(1.0, self.exposed_s / self.data_communication_s)


@dataclass(frozen=True, slots=True)
class RankTime:
    """What the stages of one pipeline rank take, each ``passes`` times a step. ``met``: messages of
    other ranks that it waits for in a step, forward and backward."""

    stages: tuple[StageTime, ...]
    passes: float
    met: tuple[float, float] = (0.0, 0.0)

    @property
    def forward_s(self) -> float:
        return sum(self.passes * one.forward_s + one.first_s for one in self.stages)

    @property
    def update_s(self) -> float:
        return sum(one.update_s for one in self.stages)

    @property
    def late_s(self) -> float:
        return sum(one.late_s for one in self.stages)

    @property
    def compute_s(self) -> float:
        return self.passes * sum(sum(one.computed_s) for one in self.stages)

    @property
    def inline_s(self) -> float:
        return self.passes * sum(sum(one.inline_s) for one in self.stages)

    @property
    def moved_s(self) -> float:
        """Over data axes, of the whole step."""
        return self.passes * self.moved_each_s + sum(one.moved_once_s for one in self.stages)

    @property
    def moved_each_s(self) -> float:
        return sum(one.moved_s for one in self.stages)

    def waiting_s(self, jitter_sqrt_s: float) -> tuple[float, float]:
        """Seconds that it waits for the slowest of those it meets, (forward, backward).

        With n meetings in T seconds of compute ranks come apart by `jitter * sqrt(T / n)` n times.
        """
        if not jitter_sqrt_s:
            return 0.0, 0.0
        each: list[float] = []
        for way, met in enumerate(self.met):
            computed_s = self.passes * sum(one.computed_s[way] for one in self.stages)
            met += sum(self.passes * one.met[way] + one.met_once[way] for one in self.stages)
            each.append(jitter_sqrt_s * math.sqrt(met * max(0.0, computed_s)))
        forward, backward = each
        return forward, backward


@dataclass(frozen=True, slots=True)
class Sums:
    """Seconds of the sums of a few numbers over ranks, once a step, that nothing hides."""

    norm_s: float
    loss_s: float
    counts_s: float


def rank_times(times: Sequence[StageTime], schedule: Schedule, microbatches: int) -> list[RankTime]:
    """``times``: of every stage of the schedule, which may stand for a longer one of so many
    microbatches."""
    passes, ranks = microbatches / len(schedule.routes), schedule.ranks
    own: list[list[StageTime]] = [[] for _ in schedule.lists]
    met = [[0.0, 0.0] for _ in schedule.lists]
    for stage, time in enumerate(times):
        own[ranks[stage]].append(time)
    for stage, around in schedule.around.items():
        for way, other in enumerate(around):
            if other is not None and ranks[other] != ranks[stage]:
                met[ranks[stage]][way] += passes
    return [
        RankTime(tuple(stages), passes, (forward, backward))
        for stages, (forward, backward) in zip(own, met, strict=True)
    ]


def step_time(
    ranks: Sequence[RankTime],
    devices: Sequence[Cluster],
    timeline_s: Number,
    busy_s: Sequence[Number],
    once: Sums,
) -> StepTime:
    """A timeline of ``timeline_s`` in which ranks compute ``busy_s``, and what all do once.

    devices: the cluster as each rank sees it.
    """
    busiest = max(range(len(ranks)), key=lambda rank: float(np.ravel(busy_s[rank])[0]))
    rank = ranks[busiest]
    waits = [r.waiting_s(v.device.jitter_sqrt_s) for r, v in zip(ranks, devices, strict=True)]
    waiting = max(waits, key=sum)
    update_s = largest(r.update_s + r.late_s for r in ranks)
    late_s = largest(r.late_s for r in ranks)
    loss_s, norm_s, counts_s = once.loss_s, once.norm_s, once.counts_s
    return StepTime(
        total_s=timeline_s + counts_s + sum(waiting) + update_s + norm_s + loss_s,
        forward_s=largest(r.forward_s + w[0] for r, w in zip(ranks, waits, strict=True)) + counts_s,
        compute_s=rank.compute_s,
        model_communication_s=rank.inline_s + late_s + norm_s,
        data_communication_s=largest(r.moved_s for r in ranks),
        moved_each_s=largest(r.moved_each_s for r in ranks),
        exposed_s=larger(0.0, timeline_s - rank.compute_s - rank.inline_s + counts_s + loss_s),
        waiting_s=sum(waiting),
        optimizer_s=largest(r.update_s for r in ranks),
    )


def sums_s(
    summary: Summary, state: StateSharding, cluster: Cluster, pp: int = 1, beside_s: float = 0.0
) -> Sums:
    """The norm of the gradient, with overflow in float16; the loss; and what means over the batch
    ask for: its counts, with the labels that move for them. ``summary`` is of all stages.

    beside_s: compute that hides the sum of the loss.
    """
    mesh = Mesh((PIPELINE, *state.mesh.axes), (pp, *state.mesh.sizes))
    cutting = summary.cutting | ({SHARD} if state.fsdp else set())
    wide = any(k.dtype == "float64" for unit, _ in summary.owners() for k in unit.trained)
    scales, size = state.precision == "float16", summary.loss_bytes
    size = size if pp == 1 else pipeline_loss_bytes(wide, state.precision)
    seconds = {
        entry.what: _time_s(entry, mesh, cluster)
        for entry in sums(mesh, cutting, state.clips, wide, scales, size)
    }
    loss_s = seconds.get("loss", 0.0)
    hidden_s = min(loss_s, beside_s)
    counts_s = sum(
        _time_s(one, state.mesh, cluster) for one in count_sums(state.mesh, summary.counts)
    )
    return Sums(
        seconds.get("gradient norm", 0.0) + seconds.get("overflow", 0.0),
        contention_of(cluster) * hidden_s + loss_s - hidden_s,
        counts_s + state.microbatches * summary.labels_s,
    )


def _time_s(entry: StateCollective, mesh: Mesh, cluster: Cluster) -> float:
    moved = entry.collective
    return entry.count * move_time_s(cluster, mesh, moved.kind, moved.axis, moved.size_bytes)
