"""What a stage of a model takes, played on a compute stream and a communication stream.

Units are the pieces that state sharding moves whole: what lies outside the blocks (the root), and
each call of a block. Model-axis collectives stand in line with compute. Data-axis traffic runs on
the communication stream: a unit's parameters are gathered while the unit before it computes, its
gradients are reduced as soon as its backward is done, or where nothing is sharded as soon as they
fill a bucket. What compute cannot cover is exposed; what it covers takes `contention` of its
seconds from the compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.compute import update_time_s
from autopar.nouns.cluster import Cluster
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
class _Traffic:
    """Seconds of collectives over data axes, and of these what nothing hides."""

    moved_s: float = 0.0
    exposed_s: float = 0.0

    def added_s(self, contention: float) -> float:
        """What they add to a step: hidden seconds take ``contention`` of theirs from compute."""
        return self.exposed_s + contention * max(0.0, self.moved_s - self.exposed_s)


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage: a forward and a backward of one microbatch, then once a step.

    weights_s:  of the backward, gradients of parameters alone.
    reduce_s:   what its gradients over the data axes take behind its last backward.
    update_s:   its optimizer.
    late_s:     its sums of gradients over model axes, behind all others.
    first_s:    what the first forward of a step takes more, where it gathers for the whole step.
    computed_s: arithmetic of a forward, and of a backward.
    inline_s:   collectives over model axes, likewise.
    moved_s:    over data axes for each microbatch, hidden or not; moved_once_s: and once a step.
    met:        how often its ranks meet in a forward and a backward; met_once: and once a step.
    """

    forward_s: float
    backward_s: float
    weights_s: float
    reduce_s: float
    update_s: float
    late_s: float
    first_s: float
    computed_s: tuple[float, float]
    inline_s: tuple[float, float]
    moved_s: float
    moved_once_s: float
    met: tuple[int, int]
    met_once: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Piece:
    forward_s: float
    backward_s: float
    gather_s: float
    regather_s: float
    reduce_s: float
    reduce_last_s: float


def stage_time(
    summary: Summary,
    state: StateSharding,
    cluster: Cluster,
    recompute: Recompute,
    beside: bool = False,
) -> StageTime:
    """What the actions of one stage take; ``summary`` is of that stage alone. ``beside``: its
    gradients are reduced beside its last backward, as where the model is one stage."""
    units = [summary.root, *(summary.bodies[name] for name in summary.calls)]
    pieces = _pieces(summary, state, cluster, recompute)
    if not state.fsdp:
        reduced = _buckets_s(units, state, cluster)
        pieces = [replace(p, reduce_last_s=s) for p, s in zip(pieces, reduced, strict=True)]
    gathers, hides, contention = (
        state.split.parameters,
        _hides(state, cluster),
        contention_of(cluster),
    )
    forward, total = _play(pieces, gathers, False, hides)
    forward_s, backward_s = (sum(p.forward_s for p in pieces), sum(p.backward_s for p in pieces))
    gathered_s = sum(p.gather_s for p in pieces)
    ahead = _Traffic(gathered_s * gathers, forward - forward_s)
    behind_s = sum(p.reduce_s + p.regather_s * gathers for p in pieces)
    behind = _Traffic(behind_s, total - forward - backward_s)
    first = _Traffic()
    if state.fsdp and not gathers:
        first = _Traffic(gathered_s, _play(pieces, True, False, hides)[0] - forward)
    reduced_s = sum(p.reduce_last_s for p in pieces)
    left_s = _play(pieces, gathers, True, hides)[1] - total if beside else reduced_s
    last = _Traffic(reduced_s, left_s)
    moved = sum(u.moved_forward_s for u in units), sum(u.moved_backward_s for u in units)
    return StageTime(
        forward_s=forward_s + ahead.added_s(contention),
        backward_s=backward_s + behind.added_s(contention),
        weights_s=sum(unit.weights_s for unit in units),
        reduce_s=last.added_s(contention),
        update_s=_optimizer_s(summary, state, cluster),
        late_s=_late_reduction_s(summary, state, cluster),
        # Stages of a pipeline gather while they wait for their first microbatch.
        first_s=first.added_s(contention) if beside else first.exposed_s,
        computed_s=(forward_s - moved[0], backward_s - moved[1]),
        inline_s=moved,
        moved_s=ahead.moved_s + behind.moved_s,
        moved_once_s=first.moved_s + last.moved_s,
        met=_meetings(units, pieces, gathers),
        met_once=_meetings_once(pieces, state),
    )


def _meetings(units: list[Unit], pieces: list[_Piece], gathers: bool) -> tuple[int, int]:
    forward, backward = (sum(u.meetings[way] for u in units) for way in (0, 1))
    if gathers:
        forward += sum(p.gather_s > 0 for p in pieces)
        backward += sum(p.regather_s > 0 for p in pieces)
    return forward, backward + sum(p.reduce_s > 0 for p in pieces)


def _meetings_once(pieces: list[_Piece], state: StateSharding) -> tuple[int, int]:
    last = sum(p.reduce_last_s > 0 for p in pieces)
    if not state.fsdp:
        return 0, min(1, last)  # buckets are waited for once, at the end
    gathered = 0 if state.split.parameters else sum(p.gather_s > 0 for p in pieces)
    return gathered, last


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
