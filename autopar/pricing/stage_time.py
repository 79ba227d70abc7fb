"""What a stage of a model takes, played on a compute stream and a communication stream.

Units are what state sharding moves whole: what lies outside the blocks (the root), and each call of
a block. They are played as `autopar.pricing.streams` has it; where nothing is sharded, gradients
are reduced as soon as they fill a bucket. What compute cannot cover is exposed; what it covers
takes `contention` of its seconds from the compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

import numpy as np

from autopar.cost_models.columns import Number
from autopar.cost_models.compute import update_time_s
from autopar.nouns.cluster import Cluster
from autopar.nouns.recompute import COMPUTE, FULL, NONE, SELECTIVE, Recompute
from autopar.pricing.offload import kept_bytes, streamed_s
from autopar.pricing.reduced import Reduced, Traffic, Way, in_buckets_s, least_shown
from autopar.pricing.software.states import spent, updated_s
from autopar.pricing.state import StateSharding
from autopar.pricing.streams import Note, Streams, UnitTime
from autopar.pricing.summary import Summary
from autopar.pricing.units.moves import (
    contention_of,
    move_time_s,
    state_time_s,
)
from autopar.pricing.units.unit import Sliced, Unit


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage: a forward and a backward of one microbatch, then once a step.

    weights_s:  of the backward, gradients of parameters alone.
    split_s:    what a backward in two parts takes more.
    reduce_s:   what its gradients over the data axes take behind its last backward.
    update_s:   its optimizer.
    late_s:     its sums of gradients over model axes, behind all others.
    first_s:    what the first forward of a step takes more, where it gathers for the whole step.
    computed_s: arithmetic of a forward, and of a backward.
    inline_s:   collectives over model axes, likewise.
    moved_s:    over data axes for each microbatch, hidden or not; moved_once_s: and once a step.
    met:        how often its ranks meet in a forward and a backward; met_once: and once a step.
    way:        in which replicas add up their gradients.
    sliced_s:   as `Unit.sliced_s`, with what runs again.
    """

    forward_s: Number
    backward_s: Number
    weights_s: Number
    split_s: Number
    reduce_s: Number
    update_s: Number
    late_s: Number
    first_s: Number
    computed_s: tuple[Number, Number]
    inline_s: tuple[Number, Number]
    moved_s: float
    moved_once_s: float
    met: tuple[int, int]
    met_once: tuple[int, int]
    way: Way
    sliced_s: Sliced = ()


@dataclass(frozen=True, slots=True)
class _Unit(UnitTime):
    """A unit under a policy; ``unit``: its own figures; ``reduce_last_s``: of its gradients, what
    is reduced in the last microbatch alone; ``sliced_s``: as `StageTime.sliced_s`."""

    unit: Unit
    reduce_last_s: float
    sliced_s: Sliced


@dataclass(frozen=True, slots=True)
class _Units:
    """The root, then every call of a block in order; each with how often there is one like it."""

    calls: list[_Unit]
    distinct: list[tuple[_Unit, int]]
    runs: list[tuple[_Unit, int]]
    """Of ``calls``, those that follow each other and are alike."""

    @staticmethod
    def of(
        summary: Summary, state: StateSharding, cluster: Cluster, recompute: Recompute
    ) -> _Units:
        each = [*zip(summary.calls, recompute.by_call(len(summary.calls)), strict=True)]
        counts = Counter(each)
        bodies = {
            call: _unit(summary.bodies[call[0]], state, cluster, call[1], root=False)
            for call in counts
        }
        root = _unit(summary.root, state, cluster, NONE, root=True)
        distinct = [(root, 1), *((bodies[call], count) for call, count in counts.items())]
        runs = [(root, 1), *((bodies[call], len([*some])) for call, some in groupby(each))]
        calls = [root, *(bodies[call] for call in each)]
        return _Units(calls, distinct, runs, state.trainer is None)

    exact: bool
    """Sums are one by one: what is equal to the last digit decides between equal cuts."""

    def sum(self, figure: Callable[[_Unit], Number]) -> Number:
        if not self.exact:
            return sum(count * figure(one) for one, count in self.distinct)
        total: Number = 0
        for one, count in self.runs:
            total = sum(repeat(figure(one), count), total)
        return total

    def count(self, seconds: Callable[[_Unit], float]) -> int:
        """Those that take any."""
        return sum(count for one, count in self.distinct if seconds(one) > 0)


def stage_time(
    summary: Summary,
    state: StateSharding,
    cluster: Cluster,
    recompute: Recompute,
    beside: bool = False,
) -> StageTime:
    """What the actions of one stage take; ``summary`` is of that stage alone. ``beside``: its
    gradients are reduced beside its last backward, as where the model is one stage, and under
    published software."""
    units = _Units.of(summary, state, cluster, recompute)
    gathers, hides = state.split.parameters, _hides(state, cluster)
    contention = contention_of(cluster) if state.trainer is None else state.trainer.contention
    forward_s, backward_s = units.sum(_forward_s), units.sum(_backward_s)
    gathered_s = units.sum(lambda p: p.gather_s)
    behind_s = units.sum(lambda p: p.reduce_s + p.regather_s * gathers)
    forward, total = forward_s, forward_s + backward_s
    streams = Streams(units.calls, gathers, hides, state.prefetch)
    if behind_s or (gathers and gathered_s):
        forward, total = streams.computed_s, streams.done_s()
    ahead = Traffic(gathered_s * gathers, forward - forward_s)
    behind = Traffic(behind_s, total - forward - backward_s)
    first = Traffic()
    if state.fsdp and not gathers:
        first = Traffic(gathered_s, Streams(units.calls, True, hides).computed_s - forward)
    last = _last(units, streams, state, cluster, beside, total)
    moved = (
        units.sum(lambda p: p.unit.moved_forward_s),
        units.sum(lambda p: p.unit.moved_backward_s),
    )
    return StageTime(
        forward_s=forward_s + ahead.added_s(contention),
        backward_s=backward_s + behind.added_s(contention),
        weights_s=units.sum(lambda p: p.unit.weights_s),
        split_s=units.sum(lambda p: p.unit.split_s),
        reduce_s=last.traffic.added_s(contention),
        update_s=_optimizer_s(summary, state, cluster),
        late_s=_late_reduction_s(summary, state, cluster),
        # Emitted stages of a pipeline gather while they wait for their first microbatch.
        first_s=first.added_s(contention) if beside else first.exposed_s,
        computed_s=(forward_s - moved[0], backward_s - moved[1]),
        inline_s=moved,
        moved_s=ahead.moved_s + behind.moved_s,
        moved_once_s=first.moved_s + last.traffic.moved_s,
        met=_meetings(units, gathers),
        met_once=_meetings_once(units, last.each, state),
        way=last.way,
        sliced_s=_sliced_s(units),
    )


def _sliced_s(units: _Units) -> Sliced:
    slices = max((len(one.sliced_s) for one, _ in units.distinct), default=0)
    every = np.zeros((slices, 2))
    for one, count in units.distinct if slices else ():
        every += count * np.array(one.sliced_s)
    return tuple((ahead, back) for ahead, back in every.tolist())


def note_microbatch(
    summary: Summary,
    state: StateSharding,
    cluster: Cluster,
    recompute: Recompute,
    beside: bool,
    note: Note,
) -> None:
    """Plays the last microbatch of a stage as `stage_time` does, for ``note``."""
    units = _Units.of(summary, state, cluster, recompute)
    gathers, hides = state.split.parameters, _hides(state, cluster)
    streams = Streams(units.calls, gathers, hides, state.prefetch)
    last = _last(units, streams, state, cluster, True, streams.done_s()).each if beside else None
    Streams(units.calls, gathers, hides, state.prefetch, note).done_s(last)


def _last(
    units: _Units,
    streams: Streams,
    state: StateSharding,
    cluster: Cluster,
    beside: bool,
    total_s: Number,
) -> Reduced:
    """What is reduced in the last backward alone."""

    def reduced(way: Way) -> Reduced:
        each = _reduced_s(units, state, cluster, way)
        reduced_s = left_s = sum(each)
        if beside and reduced_s:
            left_s = streams.done_s(each) - total_s
        return Reduced(Traffic(reduced_s, left_s), each, way)

    return least_shown(reduced, state, cluster, beside, total_s)


def _forward_s(one: _Unit) -> float:
    return one.forward_s


def _backward_s(one: _Unit) -> float:
    return one.backward_s


def _meetings(units: _Units, gathers: bool) -> tuple[int, int]:
    forward, backward = (
        sum(count * one.unit.meetings[way] for one, count in units.distinct) for way in (0, 1)
    )
    if gathers:
        forward += units.count(lambda p: p.gather_s)
        backward += units.count(lambda p: p.regather_s)
    return forward, backward + units.count(lambda p: p.reduce_s)


def _meetings_once(
    units: _Units, reduced: Sequence[float], state: StateSharding
) -> tuple[int, int]:
    last = sum(seconds > 0 for seconds in reduced)
    if not state.fsdp:
        return 0, min(1, last)  # buckets are waited for once, at the end
    return 0 if state.split.parameters else units.count(lambda p: p.gather_s), last


def _hides(state: StateSharding, cluster: Cluster) -> bool:
    """Whether state moves beside compute: FSDP2 hides its collectives by streams of a GPU; on gloo
    it waits for each of them."""
    if state.trainer is not None:
        return state.trainer.software.dp_overlap
    return not (state.fsdp and cluster.levels[-1].library == "gloo")


def _unit(unit: Unit, state: StateSharding, cluster: Cluster, policy: str, root: bool) -> _Unit:
    spent = _spent_s(unit, state, cluster)
    again = {
        NONE: 0.0,
        SELECTIVE: unit.light_s,
        COMPUTE: unit.forward_s - unit.rings_s,
        FULL: unit.forward_s + unit.moved_again_s,
    }[policy]
    return _Unit(
        unit=unit,
        forward_s=unit.forward_s + unit.moved_forward_s,
        backward_s=unit.backward_s + unit.moved_backward_s + again,
        gather_s=spent["gather_forward"],
        regather_s=0.0 if root else spent["gather_backward"],  # FSDP keeps the root whole
        reduce_s=spent["reduce"],
        reduce_last_s=spent["reduce_last"],
        sliced_s=tuple((f, b + f * (policy == FULL)) for f, b in unit.sliced_s),
    )


def _spent_s(unit: Unit, state: StateSharding, cluster: Cluster) -> dict[str, float]:
    """Seconds of its state over the data axes, by the phases of `StateSharding.traffic`."""
    if state.trainer is not None:
        return spent(state.trainer, sum(unit.trained.values()), unit.experts)
    seconds = dict.fromkeys(("gather_forward", "gather_backward", "reduce", "reduce_last"), 0.0)
    sizes: dict[tuple[str, str, str, str], int] = {}  # dtypes of one split travel together
    for kind in dict.fromkeys((*unit.trained, *unit.frozen)) if state.fsdp else ():
        held = unit.trained.get(kind, 0), kind, unit.frozen.get(kind, 0)
        for phase, moved, _ in state.traffic(*held):
            place = phase, moved.kind, moved.axis, kind.split
            sizes[place] = sizes.get(place, 0) + moved.size_bytes
    for (phase, collective, axis, _), size in sizes.items():
        seconds[phase] += state_time_s(cluster, state.mesh, True, collective, axis, size)
    return seconds


def _reduced_s(units: _Units, state: StateSharding, cluster: Cluster, way: Way) -> list[float]:
    """For each unit, what of its gradients is reduced in the last backward alone: its own, or
    where nothing is sharded the buckets that they fill."""
    if state.fsdp or state.trainer is not None:
        return [one.reduce_last_s for one in units.calls]
    return in_buckets_s([one.unit for one in units.calls], state, cluster, way)


def _late_reduction_s(summary: Summary, state: StateSharding, cluster: Cluster) -> float:
    """Gradients that are partial sums over model axes, reduced once a step in buckets."""
    sizes: dict[str, int] = {}
    for unit, copies in summary.owners():
        for axis, size in unit.deferred.items():
            sizes[axis] = sizes.get(axis, 0) + size * copies
    return sum(
        move_time_s(cluster, state.mesh, "all_reduce", axis, size) for axis, size in sizes.items()
    )


def _optimizer_s(summary: Summary, state: StateSharding, cluster: Cluster) -> Number:
    if state.trainer is not None:
        return updated_s(state.trainer, summary.owners())
    moved = sum(
        state.update_bytes(numel, kind) * copies
        for unit, copies in summary.owners()
        for kind, numel in unit.trained.items()
    )
    step_s = update_time_s(cluster.device, moved, state.optimizer)
    if not state.offloads:
        return step_s
    return step_s + streamed_s(cluster.device, kept_bytes(summary, state), state.optimizer)
