"""The price of a model cut into stages: time of a step and memory of every rank.

One object serves every cut, schedule and layout of state of one lowered graph. Stages of equal ops,
as runs of as many blocks, are summed up once, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np

from autopar.lowering.spread import Lowered
from autopar.lowering.stages import CutError, StagePart, stage_parts, updated_buffers
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Memory, Plan, Stage
from autopar.nouns.recompute import Recompute
from autopar.pipeline.actions import Action, Schedule
from autopar.pipeline.check import held
from autopar.pipeline.clock import Clock, Times, first_forwards
from autopar.pipeline.play import Costs, Timeline, play
from autopar.pipeline.schedules.of_plan import schedule_of
from autopar.pipeline.schedules.one_way import one_f_one_b
from autopar.pricing.links import links
from autopar.pricing.memory import StageBytes, rank_memory, stage_bytes
from autopar.pricing.prices import Prices
from autopar.pricing.runs import KEPT, Table, runs_of_kinds
from autopar.pricing.sends import Ends, Flow, Order, Sends, Sent, flows
from autopar.pricing.simulation import (
    StageTime,
    StepTime,
    apart_s,
    stage_time,
    sums_s,
)
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary, summarise
from autopar.rules.fusion import ALONE

Signature = tuple[bool, bytes]
"""Whether a run starts the model, and the kinds of its units."""


@dataclass(slots=True)
class CutModel:
    """A lowered graph as units between which it may be cut; parts and summaries are kept.

    units: first ops of the smallest parts that stages are made of.
    kinds: equal numbers for units of equal ops, equal resharding, and as far behind the unit that
           has the same parameters.
    ties:  (unit, the next one that calls the same instance of a block).

    One may be had for every view of a cluster (`on`); they share what prices do not change.
    """

    lowered: Lowered
    summary: Summary
    prices: Prices
    framework: str
    units: tuple[str, ...] = ()
    kinds: tuple[int, ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    flows: tuple[Flow, ...] = ()
    _kinds: bytes = b""
    _parts: dict[tuple[int, int], StagePart] = field(default_factory=dict)
    _summaries: dict[Signature, Summary] = field(default_factory=dict)
    _views: dict[Cluster, CutModel] = field(default_factory=dict)
    _sends: dict[tuple[Cluster, int, int], Sends] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.units:
            self.units = cut_points(self.lowered)
            self.ties = _ties(self.lowered, self.units)
            self.kinds = _kinds(self.lowered, self.units, self.ties)
            self._kinds = np.array(self.kinds, dtype=np.int32).tobytes()
            self.flows = flows(self.lowered, self.units)

    def on(self, view: Cluster) -> CutModel:
        """The same on other devices, or with other links."""
        if view == self.prices.cluster:
            return self
        if view not in self._views:
            known = self.prices
            prices = Prices(view, known.mesh, known.precision, known.fusion)
            summary = summarise(self.lowered, prices, self.framework)
            self._views[view] = replace(
                self, summary=summary, prices=prices, _summaries={}, _views={}
            )
        return self._views[view]

    def sends(self, cluster: Cluster, pp: int, apart: int) -> Sends:
        """Between stages of so many pipeline ranks, each so many devices from the next."""
        key = cluster, pp, apart
        if key not in self._sends:
            self._sends[key] = Sends(self.flows, len(self.units), links(cluster, pp, apart))
        return self._sends[key]

    def part(self, first: int, end: int) -> StagePart:
        """Units ``first`` to ``end - 1`` as a stage."""
        if (first, end) not in self._parts:
            starts = [i for i in (first, end) if 0 < i < len(self.units)]
            stages = [Stage(), *(Stage(first=self.units[i]) for i in starts)]
            self._parts[first, end] = stage_parts(self.lowered, stages)[1 if first else 0]
        return self._parts[first, end]

    def signature(self, first: int, end: int) -> Signature:
        """Equal for stages that cost the same: calls of equal blocks with equal resharding."""
        return first == 0, self._kinds[4 * first : 4 * end]

    def stage_summary(self, first: int, end: int) -> Summary:
        key = self.signature(first, end)
        if key not in self._summaries:
            part = self.part(first, end)
            self._summaries[key] = summarise(
                part.lowered, self.prices, self.framework, self.summary
            )
        return self._summaries[key]


def cut_points(lowered: Lowered) -> tuple[str, ...]:
    """First ops of the units: the graph's first, blocks, and ops with parameters.

    Every unit makes something that has a gradient: constants alone are no stage. A buffer that the
    forward updates is of one unit.
    """
    tensors = lowered.graph.tensors
    points = [lowered.ops[0].op.name]
    trains = False
    together = _together(lowered)
    for place, op in enumerate(lowered.ops):
        reads = any(tensors[n].role == "parameter" for n in op.op.inputs)
        flows = any(tensors[n].differentiable for n in op.op.outputs)
        cuts = not any(first < place <= last for first, last in together)
        if cuts and trains and flows and (op.op.kind == "block" or reads):
            points.append(op.op.name)
        trains = trains or flows
    return tuple(points)


def _together(lowered: Lowered) -> list[tuple[int, int]]:
    """First and last op that read a buffer which the forward updates, where they are several; a
    layer that updates its own may be called several times."""
    places: dict[str, list[int]] = {}
    updated = updated_buffers(op.op for op in lowered.ops)
    bodies = {
        name: bool(updated_buffers(op.op for op in block.ops))
        for name, block in lowered.blocks.items()
    }
    for place, op in enumerate(lowered.ops):
        held = updated.intersection(op.op.inputs)
        if op.op.kind == "block" and bodies[op.op.attrs["block"]]:
            held.add(op.op.attrs["instance"])  # with the buffers of its own
        for name in held:
            places.setdefault(name, []).append(place)
    return [(held[0], held[-1]) for held in places.values() if held[-1] > held[0]]


def _ties(lowered: Lowered, units: Sequence[str]) -> tuple[tuple[int, int], ...]:
    starts = {name: i for i, name in enumerate(units)}
    last: dict[str, int] = {}
    ties = []
    for op in lowered.ops:
        if op.op.kind == "block" and op.op.name in starts:
            unit, instance = starts[op.op.name], op.op.attrs["instance"]
            if instance in last:
                ties.append((last[instance], unit))
            last[instance] = unit
    return tuple(ties)


def _kinds(
    lowered: Lowered, units: Sequence[str], ties: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Of each unit a number for what its ops are, how what they read and give is resharded, and how
    far before it the same parameters stand. Where that is farther than in every run that a longer
    one is told from (`runs.KEPT`), units are alike only in a pattern that repeats them too."""
    starts = {name: i for i, name in enumerate(units)}
    instances = {op.op.name: op.op.attrs.get("instance") for op in lowered.ops}
    of_unit: list[list[object]] = [[] for _ in units]
    for before, unit in ties:
        instance = instances[units[unit]] if unit - before >= KEPT else ""
        of_unit[unit].append((unit - before, instance))
    unit = 0
    for op in lowered.ops:
        unit = starts.get(op.op.name, unit)
        called = op.op.name if op.bound else f"block {op.op.attrs['block']}"
        moved = tuple(operand.steps for operand in op.operands)
        given = tuple(lowered.tensors[name].steps for name in op.op.outputs)
        of_unit[unit].append((called, moved, given))
    numbers: dict[tuple[object, ...], int] = {}
    return tuple(numbers.setdefault(tuple(ops), len(numbers)) for ops in of_unit)


class Figure(IntEnum):
    """Of a stage: seconds of actions and of what comes once a step; bytes that it holds all the
    time, for each microbatch in flight, and in passing; seconds that its first forward takes more.
    """

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2
    REDUCE = 3
    UPDATE = 4
    STATE = 5
    SAVED = 6
    PASSING = 7
    FIRST = 8


class Choice(NamedTuple):
    """Of a stage; ``zero``: ZeRO level."""

    zero: int
    recompute: Recompute


@dataclass(slots=True)
class PipelinePrices:
    """`CutModel` under one layout of state: what its stages take and hold.

    pp: ranks of the pipeline; stages are as many devices apart as ``state.mesh`` has.
    by_stage: of each stage the prices on its own devices, under its own recomputation; empty: all
              are as this one.
    """

    model: CutModel
    cluster: Cluster
    state: StateSharding
    recompute: Recompute
    pp: int
    by_stage: tuple[PipelinePrices, ...] = ()
    _times: dict[Signature, StageTime] = field(default_factory=dict)
    _figures: dict[Signature, tuple[float, ...]] = field(default_factory=dict)
    _views: dict[Cluster, PipelinePrices] = field(default_factory=dict)

    def at(self, stage: int) -> PipelinePrices:
        """The prices of one stage."""
        return self.by_stage[stage] if self.by_stage else self

    def view(self, rank: int) -> Cluster:
        """The cluster as the devices of one pipeline rank see it."""
        apart = self.state.mesh.device_count
        return self.cluster.alike(rank * apart, apart)

    def on(self, view: Cluster) -> PipelinePrices:
        """Those of stages on such devices."""
        if view == self.cluster:
            return self
        if view not in self._views:
            self._views[view] = PipelinePrices(
                self.model.on(view), view, self.state, self.recompute, self.pp
            )
        return self._views[view]

    def staged(self, schedule: Schedule, choices: Sequence[Choice] = ()) -> PipelinePrices:
        """The same where every stage of the schedule has the devices of its rank, and what was
        chosen for it; none: as this."""
        own = Choice(self.state.zero, self.recompute)
        each = choices or [own] * len(schedule.ranks)
        made = {own: self}
        for one in each:
            if one not in made:
                state = replace(self.state, zero=one.zero)
                made[one] = PipelinePrices(self.model, self.cluster, state, one.recompute, self.pp)
        views = [self.view(rank) for rank in range(len(schedule.lists))]
        stages = tuple(
            made[choice].on(views[rank]) for choice, rank in zip(each, schedule.ranks, strict=True)
        )
        return self if {*map(id, stages)} == {id(self)} else replace(self, by_stage=stages)

    def saved_bytes(self, stage: int, first: int, end: int) -> int:
        """That a stage of these units keeps of one microbatch."""
        return self.model.stage_summary(first, end).life(self.at(stage).recompute).saved

    @property
    def splits_backward(self) -> bool:
        """Whether I leaves the gradients of weights to W. Where a stage recomputes, or gathers its
        parameters for each pass, I does all of backward: in two parts it would do that twice; and
        a compiled backward is one function."""
        whole = self.state.split.parameters or self.model.prices.fusion is not ALONE
        return not (self.recompute.runs_again or whole)

    def time(self, first: int, end: int) -> StageTime:
        key = self.model.signature(first, end)
        if key not in self._times:
            summary = self.model.stage_summary(first, end)
            self._times[key] = stage_time(summary, self.state, self.cluster, self.recompute)
        return self._times[key]

    @property
    def sends(self) -> Sends:
        return self.model.sends(self.cluster, self.pp, self.state.mesh.device_count)

    def sent(self, runs: Sequence[tuple[int, int]], schedule: Schedule) -> Sent:
        """What stages send one another."""
        return self.sends.between([ends_of(runs, schedule)])

    def play(self, runs: Sequence[tuple[int, int]], schedule: Schedule) -> Timeline:
        """``runs``: units of every stage of the schedule."""
        times = [self.at(stage).time(*run) for stage, run in enumerate(runs)]
        splits = [self.at(stage).splits_backward for stage in range(len(runs))]
        sent = self.sent(runs, schedule)
        skips = [(route[a], route[b]) for route in schedule.routes for a, b in sent.skips]
        first = first_forwards(schedule)

        def action_s(action: Action) -> float:
            time = times[action.stage]
            if action.kind == "F":
                return time.forward_s + (time.first_s if action in first else 0.0)
            weights_s = time.weights_s if splits[action.stage] else 0.0
            if action.kind == "W":
                return weights_s
            return time.backward_s - (weights_s if action.kind == "I" else 0.0)

        @cache
        def send_s(source: int, target: int) -> float:
            pair = min(source, target), max(source, target)
            return float(sent.between(schedule, [pair])[0, 0])

        return play(
            schedule,
            Costs(action_s, send_s, reduce_s=lambda stage: times[stage].reduce_s, skips=skips),
        )

    def figures(self, first: int, end: int) -> tuple[float, ...]:
        """What `Figure` numbers, of units ``first`` to ``end - 1``."""
        key = self.model.signature(first, end)
        if key not in self._figures:
            self._figures[key] = self._priced(first, end)
        return self._figures[key]

    def _priced(self, first: int, end: int) -> tuple[float, ...]:
        time, held = self.time(first, end), self.bytes_of(first, end)
        return (
            time.forward_s,
            time.backward_s,
            time.weights_s if self.splits_backward else 0.0,
            time.reduce_s,
            time.update_s,
            held.parameters + held.gradients + held.optimizer + held.casts + held.gathered,
            held.saved,
            held.passing,
            time.first_s,
        )

    def table(self) -> Table:
        """[figures, units + 1, units + 1] of every run of units."""
        of_state = [Figure.REDUCE, Figure.UPDATE, Figure.STATE]
        runs = runs_of_kinds(self.model.kinds)
        return runs.table(self.figures, [Figure.PASSING], of_state, self.model.ties)

    def clocked(self, runs: Sequence[tuple[int, int]], order: Order) -> tuple[float, list[float]]:
        """Seconds of the timeline and of each rank's compute, as `play` has them."""
        each = [self.at(stage).figures(*run) for stage, run in enumerate(runs)]
        figures = np.array(each).T[..., None]
        _, times = clocked(order, figures, self.sent(runs, order.schedule))
        return float(times.step_s[0]), times.busy_s[:, 0].tolist()

    def bytes_of(self, first: int, end: int) -> StageBytes:
        return stage_bytes(self.model.stage_summary(first, end), self.state, self.recompute)

    def memory(self, runs: Sequence[tuple[int, int]], schedule: Schedule) -> list[Memory]:
        """Of every rank."""
        each = [self.at(stage).bytes_of(*run) for stage, run in enumerate(runs)]
        peaks = held(schedule, lambda stage: each[stage].saved)
        own = [
            [stage for i, stage in enumerate(each) if schedule.ranks[i] == rank]
            for rank in range(len(peaks))
        ]
        return [
            rank_memory(own[rank], int(peak), self.view(rank).device)
            for rank, peak in enumerate(peaks)
        ]

    def step(
        self,
        runs: Sequence[tuple[int, int]],
        schedule: Schedule,
        step_s: float,
        busy_s: Sequence[float],
    ) -> StepTime:
        """A timeline of ``step_s`` in which ranks compute ``busy_s``, then loss and norm of all
        ranks, the slowest optimizer, and what ranks wait for one another."""
        own: list[list[StageTime]] = [[] for _ in schedule.lists]
        for stage, run in enumerate(runs):
            own[schedule.ranks[stage]].append(self.at(stage).time(*run))
        update_s = max(sum(time.update_s for time in times) for times in own)
        passes = schedule.microbatches / len(schedule.routes)
        busiest_s = max(busy_s)
        ranks = schedule.ranks
        met = [passes * sum(time.meetings for time in times) for times in own]
        for stage, around in schedule.around.items():
            met[ranks[stage]] += passes * sum(
                other is not None and ranks[other] != ranks[stage] for other in around
            )
        views = map(self.view, range(len(own)))
        waiting_s = max(map(apart_s, views, met, busy_s))
        once = sums_s(self.model.summary, self.state, self.cluster, self.pp)
        summed_s = once.norm_s + once.loss_s
        return StepTime(
            total_s=step_s + update_s + waiting_s + summed_s,
            forward_s=max(sum(time.forward_s for time in times) * passes for times in own),
            compute_s=busiest_s,
            model_communication_s=summed_s,
            data_communication_s=max(sum(time.reduce_s for time in times) for times in own),
            exposed_s=step_s - busiest_s,
            waiting_s=waiting_s,
            optimizer_s=update_s,
        )


def clocked(order: Order, figures: Table, sent: Sent) -> tuple[Clock, Times]:
    """What the schedule takes by ``figures`` [figures, stages, columns]."""
    clock = order.clock(sent.skips)
    forward, backward, weights = figures[: Figure.WEIGHTS + 1]
    every = [forward, backward, backward - weights, weights, forward + figures[Figure.FIRST]]
    seconds = sent.between(order.schedule, clock.pairs)
    return clock, clock.times(np.stack(every, axis=1), seconds, figures[Figure.REDUCE])


def ends_of(runs: Sequence[tuple[int, int]], schedule: Schedule) -> Ends:
    """The inverse of `runs_of`."""
    return tuple(runs[stage][1] for stage in schedule.routes[0])


def runs_of(ends: Ends, schedule: Schedule) -> list[tuple[int, int]]:
    """(first unit, end) of every stage of the schedule, on both routes where there are two."""
    parts = list(zip((0, *ends), ends, strict=False))
    return [parts[schedule.part[stage]] for stage in range(len(schedule.ranks))]


def choices_of(parts: Sequence[Stage], schedule: Schedule) -> list[Choice]:
    """Of every stage of the schedule, from the model's parts."""
    own = [parts[schedule.part[stage]] for stage in range(len(schedule.ranks))]
    return [Choice(stage.zero, stage.recompute) for stage in own]


@dataclass(frozen=True, slots=True)
class PricedPipeline:
    """A plan's own cuts, played. A plan of one stage is a pipeline of one rank."""

    prices: PipelinePrices
    schedule: Schedule
    ends: Ends
    timeline: Timeline

    @property
    def runs(self) -> list[tuple[int, int]]:
        return runs_of(self.ends, self.schedule)


def price_pipeline(
    plan: Plan, lowered: Lowered, summary: Summary, prices: Prices, cluster: Cluster
) -> PricedPipeline:
    """Prices the stages of ``plan`` on its own lowered graph. Raises `CutError`."""
    model = CutModel(lowered, summary, prices, plan.framework)
    first = plan.stages[0]
    if len({(s.spread, s.offload) for s in plan.stages}) > 1:
        raise CutError(
            "its stages differ in spread or offload, and are priced with one of each so far"
        )
    state = StateSharding(
        first.zero,
        plan.mesh(first),
        plan.microbatches,
        plan.precision,
        plan.optimizer,
        plan.clip_norm is not None,
        first.offload,
    )
    priced = PipelinePrices(model, cluster, state, first.recompute, len(plan.groups))
    several = len(plan.stages) > 1
    schedule = schedule_of(plan) if several else one_f_one_b(1, plan.microbatches, 1)
    priced = priced.staged(schedule, choices_of(plan.stages, schedule))
    places = {name: i for i, name in enumerate(model.units)}
    unknown = [s.first for s in plan.stages[1:] if s.first not in places]
    if unknown:
        raise CutError(f"a stage starts at {unknown[0]!r}, where the model cannot be cut")
    ends = (*(places[s.first] for s in plan.stages[1:]), len(model.units))
    return PricedPipeline(priced, schedule, ends, priced.play(runs_of(ends, schedule), schedule))
