"""The price of a model cut into stages: time of a step and memory of every rank.

One object serves every cut, schedule and layout of state of one lowered graph. Stages of equal ops,
as runs of as many blocks, are summed up once, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.lowering.spread import Lowered
from autopar.lowering.stages import CutError, StagePart, stage_parts
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Memory, Plan, Stage
from autopar.pipeline.actions import Action, Schedule
from autopar.pipeline.check import held
from autopar.pipeline.of_plan import schedule_of
from autopar.pipeline.play import Costs, Timeline, play
from autopar.pipeline.schedules.one_way import one_f_one_b
from autopar.planner.pricing.memory import rank_memory
from autopar.planner.pricing.moves import send_time_s
from autopar.planner.pricing.prices import Prices
from autopar.planner.pricing.simulation import StageTime, StepTime, stage_time
from autopar.planner.pricing.state import StateSharding
from autopar.planner.pricing.summary import Summary, summarise

Ends = tuple[int, ...]
"""The unit behind the last one of every stage."""


@dataclass(slots=True)
class CutModel:
    """A lowered graph as units between which it may be cut; parts and summaries are kept.

    units: first ops of the smallest parts that stages are made of.
    """

    lowered: Lowered
    summary: Summary
    prices: Prices
    framework: str
    units: tuple[str, ...] = ()
    _parts: dict[tuple[int, int], StagePart] = field(default_factory=dict)
    _summaries: dict[tuple[object, ...], Summary] = field(default_factory=dict)
    _kinds: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        self.units = cut_points(self.lowered)
        self._kinds = _kinds(self.lowered, self.units)

    def part(self, first: int, end: int) -> StagePart:
        """Units ``first`` to ``end - 1`` as a stage."""
        if (first, end) not in self._parts:
            starts = [i for i in (first, end) if 0 < i < len(self.units)]
            stages = [Stage(), *(Stage(first=self.units[i]) for i in starts)]
            self._parts[first, end] = stage_parts(self.lowered, stages)[1 if first else 0]
        return self._parts[first, end]

    def signature(self, first: int, end: int) -> tuple[object, ...]:
        """Equal for stages that cost the same: calls of equal blocks with equal resharding."""
        return self._kinds[first:end]

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

    Every unit makes something that has a gradient: constants alone are no stage.
    """
    tensors = lowered.graph.tensors
    found = [lowered.ops[0].op.name]
    trains = False
    for op in lowered.ops:
        reads = any(tensors[n].role == "parameter" for n in op.op.inputs)
        flows = any(tensors[n].differentiable for n in op.op.outputs)
        if trains and flows and (op.op.kind == "block" or reads):
            found.append(op.op.name)
        trains = trains or flows
    return tuple(found)


def _kinds(lowered: Lowered, units: Sequence[str]) -> tuple[object, ...]:
    """Of each unit, what its ops are and how what they read and give is resharded."""
    starts = {name: i for i, name in enumerate(units)}
    found: list[list[object]] = [[] for _ in units]
    unit = 0
    for op in lowered.ops:
        unit = starts.get(op.op.name, unit)
        called = op.op.name if op.bound else f"block {op.op.attrs['block']}"
        moved = tuple(operand.steps for operand in op.operands)
        given = tuple(lowered.tensors[name].steps for name in op.op.outputs)
        found[unit].append((called, moved, given))
    return tuple(map(tuple, found))


@dataclass(slots=True)
class PipelinePrices:
    """`CutModel` under one layout of state: what its stages take and hold.

    pp: ranks of the pipeline; stages are as many devices apart as ``state.mesh`` has.
    """

    model: CutModel
    cluster: Cluster
    state: StateSharding
    recompute: str
    pp: int
    _times: dict[tuple[object, ...], StageTime] = field(default_factory=dict)
    _sends: dict[int, float] = field(default_factory=dict)

    @property
    def splits_backward(self) -> bool:
        """Whether I leaves the gradients of weights to W. Where a stage recomputes, or gathers its
        parameters for each pass, I does all of backward: in two parts it would do that twice."""
        return self.recompute == "none" and not self.state.split.parameters

    def time(self, first: int, end: int) -> StageTime:
        key = self.model.signature(first, end)
        if key not in self._times:
            summary = self.model.stage_summary(first, end)
            self._times[key] = stage_time(summary, self.state, self.cluster, self.recompute)
        return self._times[key]

    def send_s(self, part: StagePart, names: Sequence[str]) -> float:
        """Of these values of a microbatch, from one stage to the next."""
        return sum(self._send_s(part.lowered.local_bytes(name)) for name in names)

    def _send_s(self, size_bytes: int) -> float:
        if size_bytes not in self._sends:
            apart = self.state.mesh.device_count
            self._sends[size_bytes] = send_time_s(self.cluster, self.pp, apart, size_bytes)
        return self._sends[size_bytes]

    def play(self, runs: Sequence[tuple[int, int]], schedule: Schedule) -> Timeline:
        """``runs``: units of every stage of the schedule."""
        parts = [self.model.part(*run) for run in runs]
        times = [self.time(*run) for run in runs]
        reads = [set(part.takes) for part in parts]

        def action_s(action: Action) -> float:
            time = times[action.stage]
            if action.kind == "F":
                return time.forward_s
            weights_s = time.weights_s if self.splits_backward else 0.0
            if action.kind == "W":
                return weights_s
            return time.backward_s - (weights_s if action.kind == "I" else 0.0)

        def send_s(source: int, target: int) -> float:
            low, high = sorted((source, target))
            return self.send_s(parts[low], [n for n in parts[low].gives if n in reads[high]])

        skips = [
            (a, b)
            for route in schedule.routes
            for i, a in enumerate(route)
            for b in route[i + 2 :]
            if reads[b].intersection(parts[a].gives)
        ]
        return play(
            schedule,
            Costs(action_s, send_s, reduce_s=lambda stage: times[stage].reduce_s, skips=skips),
        )

    def memory_of(self, first: int, end: int, passes: int) -> Memory:
        """Of a rank with this stage alone, which holds ``passes`` microbatches for backward."""
        summary = self.model.stage_summary(first, end)
        saved = summary.lives[self.recompute].saved * passes
        return rank_memory([(summary, self.state, self.recompute)], saved, self.cluster.device)

    def memory(self, runs: Sequence[tuple[int, int]], schedule: Schedule) -> list[Memory]:
        """Of every rank."""
        summaries = [self.model.stage_summary(*run) for run in runs]
        peaks = held(schedule, lambda stage: summaries[stage].lives[self.recompute].saved)
        return [
            rank_memory(
                [
                    (summary, self.state, self.recompute)
                    for stage, summary in enumerate(summaries)
                    if schedule.ranks[stage] == rank
                ],
                int(peak),
                self.cluster.device,
            )
            for rank, peak in enumerate(peaks)
        ]

    def step(
        self, runs: Sequence[tuple[int, int]], schedule: Schedule, timeline: Timeline
    ) -> StepTime:
        """The timeline, then the slowest rank's optimizer."""
        own: list[list[StageTime]] = [[] for _ in schedule.lists]
        for stage, run in enumerate(runs):
            own[schedule.ranks[stage]].append(self.time(*run))
        update_s = max(sum(time.update_s for time in times) for times in own)
        passes = schedule.microbatches / len(schedule.routes)
        busiest_s = max(timeline.busy_s)
        return StepTime(
            total_s=timeline.step_s + update_s,
            forward_s=max(sum(time.forward_s for time in times) * passes for times in own),
            compute_s=busiest_s,
            model_communication_s=0.0,
            data_communication_s=max(sum(time.reduce_s for time in times) for times in own),
            exposed_s=timeline.step_s - busiest_s,
            waiting_s=0.0,
            optimizer_s=update_s,
        )


def runs_of(ends: Ends, schedule: Schedule) -> list[tuple[int, int]]:
    """(first unit, end) of every stage of the schedule, on both routes where there are two."""
    parts = list(zip((0, *ends), ends, strict=False))
    return [parts[schedule.part[stage]] for stage in range(len(schedule.ranks))]


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
    if len({(s.spread, s.zero, s.recompute) for s in plan.stages}) > 1:
        raise CutError(
            "its stages differ in spread, zero or recompute, and are priced with one of each so far"
        )
    state = StateSharding(
        first.zero, plan.mesh(first), plan.microbatches, plan.precision, plan.optimizer
    )
    priced = PipelinePrices(model, cluster, state, first.recompute, len(plan.groups))
    several = len(plan.stages) > 1
    schedule = schedule_of(plan) if several else one_f_one_b(1, plan.microbatches, 1)
    places = {name: i for i, name in enumerate(model.units)}
    unknown = [s.first for s in plan.stages[1:] if s.first not in places]
    if unknown:
        raise CutError(f"a stage starts at {unknown[0]!r}, where the model cannot be cut")
    ends = (*(places[s.first] for s in plan.stages[1:]), len(model.units))
    return PricedPipeline(priced, schedule, ends, priced.play(runs_of(ends, schedule), schedule))
