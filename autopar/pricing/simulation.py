"""One training step, played on a compute stream and a communication stream.

Units are the pieces that state sharding moves whole: what lies outside the blocks (the root), and
each call of a block. Model-axis collectives stand in line with compute. Data-axis traffic runs on
the communication stream: a unit's parameters are gathered while the unit before it computes, its
gradients are reduced as soon as its backward is done, or where nothing is sharded as soon as they
fill a bucket. What compute cannot cover is exposed. The loss is summed over data ranks beside the
last backward; the norm of the gradient, where it is clipped, behind all reductions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.cost_models.compute import update_time_s
from autopar.lowering.state import StateCollective, count_sums, pipeline_loss_bytes, sums
from autopar.nouns.axes import PIPELINE, SHARD
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import COMPUTE, FULL, NONE, SELECTIVE, Recompute
from autopar.pricing.moves import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    bucket_time_s,
    contention_of,
    move_time_s,
    state_time_s,
)
from autopar.pricing.offload import kept_bytes, streamed_s
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary, Unit


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step and where they go."""

    total_s: float
    forward_s: float
    """Forward passes, with what moves in them."""
    compute_s: float
    model_communication_s: float
    data_communication_s: float
    exposed_s: float
    """Data-axis communication that nothing hid."""
    waiting_s: float
    """For the slowest rank, wherever ranks meet."""
    optimizer_s: float

    @property
    def exposed_share(self) -> float:
        """How much of the data-axis traffic could not be hidden."""
        if self.data_communication_s <= 0:
            return 0.0
        return min(1.0, self.exposed_s / self.data_communication_s)


@dataclass(frozen=True, slots=True)
class _Piece:
    forward_s: float
    backward_s: float
    gather_s: float
    regather_s: float
    reduce_s: float
    reduce_last_s: float


def simulate(
    summary: Summary, state: StateSharding, cluster: Cluster, recompute: Recompute
) -> StepTime:
    """Plays one step of a plan under a state sharding."""
    units = [summary.root, *(summary.bodies[name] for name in summary.calls)]
    pieces = _pieces(summary, state, cluster, recompute)
    if not state.fsdp:
        reduced = _buckets_s(units, state, cluster)
        pieces = [replace(p, reduce_last_s=s) for p, s in zip(pieces, reduced, strict=True)]
    microbatches = summary.microbatches
    busy = sum(p.forward_s + p.backward_s for p in pieces)
    inline = sum(u.moved_forward_s + u.moved_backward_s for u in units) * microbatches
    optimizer = _optimizer_s(summary, state, cluster)
    late = _late_reduction_s(summary, state, cluster)
    once = sums_s(summary, state, cluster)
    late += once.norm_s
    each_gathers = state.split.parameters
    hides = _hides(state, cluster)
    forward, total = _play(pieces, state.fsdp, microbatches == 1, hides)
    if microbatches > 1:
        middle = _play(pieces, each_gathers, False, hides)
        end = _play(pieces, each_gathers, True, hides)
        forward += middle[0] * (microbatches - 2) + end[0]
        total += middle[1] * (microbatches - 2) + end[1]
    gathers = state.split.gathers(microbatches)
    gathered = sum(p.gather_s for p in pieces) * gathers
    data = gathered + sum(
        p.regather_s * gathers + p.reduce_s * microbatches + p.reduce_last_s for p in pieces
    )
    contention = contention_of(cluster)
    computed = sum(p.forward_s for p in pieces) * microbatches
    total += contention * max(0.0, data - (total - busy * microbatches))
    forward += contention * max(0.0, gathered - (forward - computed))
    counted = counts_s(summary, state, cluster)
    forward += counted
    total += counted
    last_backward_s = sum(p.backward_s for p in pieces)
    hidden_s = min(once.loss_s, last_backward_s)
    total += contention * hidden_s + once.loss_s - hidden_s
    jitter_sqrt_s = cluster.device.jitter_sqrt_s
    waiting = _waiting_s(units, pieces, microbatches, gathers, state.fsdp, jitter_sqrt_s)
    return StepTime(
        total_s=total + sum(waiting) + optimizer + late,
        forward_s=forward + waiting[0],
        compute_s=busy * microbatches - inline,
        model_communication_s=inline + late,
        data_communication_s=data,
        exposed_s=max(0.0, total - busy * microbatches),
        waiting_s=sum(waiting),
        optimizer_s=optimizer,
    )


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage: a forward and a backward of one microbatch, then once a step.

    weights_s: of the backward, gradients of parameters alone.
    reduce_s:  its gradients over the data axes, after its last backward.
    update_s:  its optimizer, and late sums of gradients over model axes.
    meetings:  of the ranks of its mesh, in one microbatch.
    first_s:   what the first forward of a step takes more, where it gathers for the whole step.
    """

    forward_s: float
    backward_s: float
    weights_s: float
    reduce_s: float
    update_s: float
    meetings: int = 0
    first_s: float = 0.0


def stage_time(
    summary: Summary, state: StateSharding, cluster: Cluster, recompute: Recompute
) -> StageTime:
    """What the actions of one stage of a pipeline take; ``summary`` is of that stage alone."""
    units = [summary.root, *(summary.bodies[name] for name in summary.calls)]
    pieces = _pieces(summary, state, cluster, recompute)
    each_gathers = state.split.parameters
    hides = _hides(state, cluster)
    forward, total = _play(pieces, each_gathers, False, hides)
    backward, contention = total - forward, contention_of(cluster)
    if each_gathers:
        gathered = sum(p.gather_s for p in pieces)
        exposed = forward - sum(p.forward_s for p in pieces)
        forward += contention * max(0.0, gathered - exposed)
    moved = sum(p.reduce_s + p.regather_s * each_gathers for p in pieces)
    exposed = backward - sum(p.backward_s for p in pieces)
    backward += contention * max(0.0, moved - exposed)
    if state.fsdp:
        reduce_s = sum(p.reduce_last_s for p in pieces)
    else:
        reduce_s = sum(_buckets_s(units, state, cluster))
    late = _late_reduction_s(summary, state, cluster)
    return StageTime(
        forward_s=forward,
        backward_s=backward,
        weights_s=sum(unit.weights_s for unit in units),
        reduce_s=reduce_s,
        update_s=_optimizer_s(summary, state, cluster) + late,
        meetings=sum(sum(unit.meetings) for unit in units),
        first_s=max(0.0, _play(pieces, True, False, hides)[0] - forward) if state.fsdp else 0.0,
    )


def apart_s(cluster: Cluster, meetings: float, computed_s: float) -> float:
    """Seconds that a rank waits for others where they meet so often in so much compute."""
    return cluster.device.jitter_sqrt_s * math.sqrt(meetings * max(0.0, computed_s))


def _hides(state: StateSharding, cluster: Cluster) -> bool:
    """Whether state moves beside compute: FSDP2 hides its collectives by streams of a GPU; on gloo
    it waits for each of them."""
    return not (state.fsdp and cluster.levels[-1].library == "gloo")


def _play(units: list[_Piece], gather: bool, last: bool, hides: bool = True) -> tuple[float, float]:
    """Seconds of one microbatch's forward, and of all of it.

    Unit 0 is the root, gathered first and reduced last. The gather of a unit is issued when the
    unit before it starts to compute, so backward it goes ahead of that unit's reduction.
    ``hides``: communication runs beside compute, else each waits for the other.
    """
    compute = communication = 0.0

    def moved(issued: float, seconds: float) -> float:
        """When a collective is done; it starts no sooner than ``issued``."""
        nonlocal compute, communication
        if not seconds:
            return 0.0
        if not hides:
            compute += seconds
            return compute
        communication = max(communication, issued) + seconds
        return communication

    arrived = moved(0.0, units[0].gather_s) if gather else 0.0
    for unit, following in zip(units, [*units[1:], None], strict=True):
        start = max(compute, arrived)
        arrived = moved(start, following.gather_s) if gather and following else 0.0
        compute = max(start, compute) + unit.forward_s
    forward = compute
    backward = units[::-1]
    arrived = moved(forward, backward[0].regather_s) if gather else 0.0
    for unit, following in zip(backward, [*backward[1:], None], strict=True):
        start = max(compute, arrived)
        arrived = moved(start, following.regather_s) if gather and following else 0.0
        compute = max(start, compute) + unit.backward_s
        moved(compute, unit.reduce_s + (unit.reduce_last_s if last else 0.0))
    return forward, max(compute, communication)


def _pieces(
    summary: Summary, state: StateSharding, cluster: Cluster, recompute: Recompute
) -> list[_Piece]:
    """The root, and every call of a block in order."""
    each = [*zip(summary.calls, recompute.by_call(len(summary.calls)), strict=True)]
    bodies = {
        (name, policy): _piece(summary.bodies[name], state, cluster, policy, root=False)
        for name, policy in dict.fromkeys(each)
    }
    root = _piece(summary.root, state, cluster, NONE, root=True)
    return [root, *(bodies[call] for call in each)]


def _piece(unit: Unit, state: StateSharding, cluster: Cluster, policy: str, root: bool) -> _Piece:
    spent = dict.fromkeys(("gather_forward", "gather_backward", "reduce", "reduce_last"), 0.0)
    for dtype, count in unit.trained.items() if state.fsdp else ():
        for phase, moved, _ in state.traffic(count, dtype):
            spent[phase] += state_time_s(
                cluster, state.mesh, True, moved.kind, moved.axis, moved.size_bytes
            )
    again = {
        NONE: 0.0,
        SELECTIVE: unit.light_s,
        COMPUTE: unit.forward_s,
        FULL: unit.forward_s + unit.moved_again_s,
    }[policy]
    return _Piece(
        forward_s=unit.forward_s + unit.moved_forward_s,
        backward_s=unit.backward_s + unit.moved_backward_s + again,
        gather_s=spent["gather_forward"],
        regather_s=0.0 if root else spent["gather_backward"],  # FSDP keeps the root whole
        reduce_s=spent["reduce"],
        reduce_last_s=spent["reduce_last"],
    )


def _waiting_s(
    units: list[Unit],
    pieces: list[_Piece],
    microbatches: int,
    gathers: int,
    fsdp: bool,
    jitter_sqrt_s: float,
) -> tuple[float, float]:
    """Seconds that ranks wait for the slowest, (forward, backward).

    With n meetings in T seconds of compute they come apart by `jitter * sqrt(T / n)` n times.
    """
    forward_meetings = microbatches * sum(u.meetings[0] for u in units)
    forward_meetings += gathers * sum(p.gather_s > 0 for p in pieces)
    backward_meetings = microbatches * sum(u.meetings[1] for u in units)
    backward_meetings += gathers * sum(p.regather_s > 0 for p in pieces)
    backward_meetings += microbatches * sum(p.reduce_s > 0 for p in pieces)
    last = sum(p.reduce_last_s > 0 for p in pieces)
    backward_meetings += last if fsdp else min(1, last)  # buckets are waited for once, at the end
    computed = zip(units, pieces, strict=True)
    spent = [
        (p.forward_s - u.moved_forward_s, p.backward_s - u.moved_backward_s) for u, p in computed
    ]
    forward_s, backward_s = (microbatches * sum(way) for way in zip(*spent, strict=True))
    return (
        jitter_sqrt_s * math.sqrt(forward_meetings * forward_s),
        jitter_sqrt_s * math.sqrt(backward_meetings * max(0.0, backward_s)),
    )


def _buckets_s(units: list[Unit], state: StateSharding, cluster: Cluster) -> list[float]:
    """For each unit, the seconds of the buckets that its gradients fill in the last backward.

    Buckets are filled from the last unit to the first, as DistributedDataParallel does.
    """
    seconds = [0.0] * len(units)
    sent: dict[str, float] = {}
    waiting: dict[str, float] = {}
    room = FIRST_BUCKET_BYTES
    for i, unit in reversed(list(enumerate(units))):
        for dtype, count in unit.trained.items():
            for _, moved, _ in state.traffic(count, dtype):
                waiting[moved.axis] = waiting.get(moved.axis, 0.0) + moved.size_bytes
        if max(waiting.values(), default=0.0) < room and i:
            continue
        room = BUCKET_BYTES
        for axis, size in waiting.items():
            before = sent.get(axis, 0.0)
            seconds[i] += bucket_time_s(cluster, state.mesh, axis, before, size)
            sent[axis] = before + size
        waiting = {}
    return seconds


def counts_s(summary: Summary, state: StateSharding, cluster: Cluster) -> float:
    """Means over the batch ask for its counts before the first forward; nothing hides that."""
    return sum(
        _time_s(entry, state.mesh, cluster) for entry in count_sums(state.mesh, summary.counts)
    )


@dataclass(frozen=True, slots=True)
class Sums:
    """Seconds of the sums of one number over ranks, once a step."""

    norm_s: float
    loss_s: float


def sums_s(summary: Summary, state: StateSharding, cluster: Cluster, pp: int = 1) -> Sums:
    """The norm of the gradient, with overflow in float16, and the loss; ``summary`` is of all
    stages."""
    mesh = Mesh((PIPELINE, *state.mesh.axes), (pp, *state.mesh.sizes))
    cutting = summary.cutting | ({SHARD} if state.fsdp else set())
    wide = any("float64" in unit.trained for unit, _ in summary.owners())
    scales, size = state.precision == "float16", summary.loss_bytes
    size = size if pp == 1 else pipeline_loss_bytes(wide, state.precision)
    seconds = {
        entry.what: _time_s(entry, mesh, cluster)
        for entry in sums(mesh, cutting, state.clips, wide, scales, size)
    }
    late = seconds.get("gradient norm", 0.0) + seconds.get("overflow", 0.0)
    return Sums(late, seconds.get("loss", 0.0))


def _time_s(entry: StateCollective, mesh: Mesh, cluster: Cluster) -> float:
    moved = entry.collective
    return entry.count * move_time_s(cluster, mesh, moved.kind, moved.axis, moved.size_bytes)


def _late_reduction_s(summary: Summary, state: StateSharding, cluster: Cluster) -> float:
    """Gradients that are partial sums over model axes, reduced once a step in buckets."""
    sizes: dict[str, int] = {}
    for unit, copies in summary.owners():
        for axis, size in unit.deferred.items():
            sizes[axis] = sizes.get(axis, 0) + size * copies
    return sum(
        move_time_s(cluster, state.mesh, "all_reduce", axis, size) for axis, size in sizes.items()
    )


def _optimizer_s(summary: Summary, state: StateSharding, cluster: Cluster) -> float:
    moved = sum(
        state.update_bytes(numel, dtype) * copies
        for unit, copies in summary.owners()
        for dtype, numel in unit.trained.items()
    )
    updated_s = update_time_s(cluster.device, moved, state.optimizer)
    if not state.offloads:
        return updated_s
    return updated_s + streamed_s(cluster.device, kept_bytes(summary, state), state.optimizer)
