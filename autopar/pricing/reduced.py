"""What replicas add up in the last backward: in which buckets, and by which all-reduce.

Buckets are filled from the last unit to the first, as DistributedDataParallel does. Where a choice
is open, the usual one stands unless another shows less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from autopar.cost_models.columns import Number, larger
from autopar.nouns.buckets import BUCKET_BYTES, BUCKETS, FIRST_BUCKET_BYTES, GAIN
from autopar.nouns.cluster import Cluster
from autopar.nouns.reduction import LIBRARY, TWO_LEVEL
from autopar.pricing.state import StateSharding
from autopar.pricing.two_level import SubGroups, data_cut, two_level_time_s
from autopar.pricing.units.moves import before_counts, bucket_time_s, contention_of
from autopar.pricing.units.unit import Unit


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds of collectives over data axes, and of these what nothing hides."""

    moved_s: float = 0.0
    exposed_s: float = 0.0

    def added_s(self, contention: float) -> float:
        """What they add to a step: hidden seconds take ``contention`` of theirs from compute."""
        return self.exposed_s + contention * larger(0.0, self.moved_s - self.exposed_s)


@dataclass(frozen=True, slots=True)
class Way:
    """In buckets of how many bytes gradients are added up, and whether on two levels."""

    bucket_bytes: int = BUCKET_BYTES
    two_level: bool = False


@dataclass(frozen=True, slots=True)
class Reduced:
    """``each``: seconds of what each unit reduces in the last backward alone."""

    traffic: Traffic
    each: list[float]
    way: Way = Way()


def least_shown(
    reduced: Callable[[Way], Reduced],
    state: StateSharding,
    cluster: Cluster,
    beside: bool,
    total_s: Number,
) -> Reduced:
    """The pinned way, or the usual one, unless another shows less by `GAIN` of ``total_s``, a pass.

    Nothing is chosen where gradients are not reduced ``beside`` backward.
    """
    contention, saved_s = contention_of(cluster), GAIN * total_s

    def shown_s(one: Reduced) -> float:
        return one.traffic.added_s(contention)

    def in_buckets(two_level: bool) -> Reduced:
        best = usual = reduced(Way(state.bucket_bytes or BUCKET_BYTES, two_level))
        if state.bucket_bytes or not beside or state.fsdp or not usual.traffic.moved_s:
            return usual
        for bucket_bytes in BUCKETS[1:]:
            other = reduced(Way(bucket_bytes, two_level))
            if shown_s(other) < min(shown_s(best), shown_s(usual) - saved_s):
                best = other
        return best

    if state.fsdp or state.all_reduce == LIBRARY or data_cut(cluster, state.mesh) is None:
        return in_buckets(False)
    if state.all_reduce == TWO_LEVEL:
        return in_buckets(True)
    best = in_buckets(False)
    # On NCCL it has yet to run: there it is taken where it is pinned.
    if beside and cluster.levels[-1].library == "gloo":
        other = in_buckets(True)
        if shown_s(other) < shown_s(best) - saved_s:
            return other
    return best


def in_buckets_s(
    units: Sequence[Unit], state: StateSharding, cluster: Cluster, way: Way
) -> list[float]:
    """For each unit, the seconds of the buckets that its gradients fill."""
    seconds = [0.0] * len(units)
    if not state.mesh.batch_axes:
        return seconds
    all_data = "+".join(state.mesh.batch_axes)
    cut = data_cut(cluster, state.mesh) if way.two_level else None
    sizes = {key: _sizes(unit, state) for key, unit in {id(u): u for u in units}.items()}
    sent: dict[str, float] = {}
    waiting: dict[str, float] = {}
    room = FIRST_BUCKET_BYTES
    counted = {
        axis
        for axis in {axis for of in sizes.values() for axis in of}
        if before_counts(cluster, state.mesh, axis, way.bucket_bytes)
    }

    @cache
    def taken_s(axis: str, before: float, size: float) -> float:
        if cut is not None and axis == all_data:
            return _two_level_s(cluster, cut, size, way.bucket_bytes)
        return bucket_time_s(cluster, state.mesh, axis, before, size, way.bucket_bytes)

    for i, unit in reversed(list(enumerate(units))):
        for axis, size in sizes[id(unit)].items():
            waiting[axis] = waiting.get(axis, 0.0) + size
        if max(waiting.values(), default=0.0) < room and i:
            continue
        room = way.bucket_bytes
        for axis, size in waiting.items():
            before = sent.get(axis, 0.0)
            seconds[i] += taken_s(axis, before if axis in counted else 0.0, size)
            sent[axis] = before + size
        waiting = {}
    return seconds


def _two_level_s(cluster: Cluster, cut: SubGroups, size: float, bucket_bytes: int) -> float:
    full, rest = divmod(size, bucket_bytes)
    one_s, rest_s = (two_level_time_s(cluster, cut, b) for b in (bucket_bytes, rest))
    return full * one_s + rest_s


def _sizes(unit: Unit, state: StateSharding) -> dict[str, float]:
    """Bytes of a unit's gradients, by the axes over which they are reduced."""
    sizes: dict[str, float] = {}
    for kind, count in unit.trained.items():
        for _, moved, _ in state.traffic(count, kind):
            sizes[moved.axis] = sizes.get(moved.axis, 0.0) + moved.size_bytes
    return sizes
