"""The price of a model cut into stages: time of a step and memory of every rank.

One object serves every cut, schedule and layout of state of one lowered graph. A model that is one
stage is a pipeline of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from autopar.cost_models.columns import Number, plain, table
from autopar.nouns.cluster import Cluster
from autopar.nouns.prediction import Memory
from autopar.nouns.recompute import Recompute
from autopar.pipeline.actions import Action, Schedule
from autopar.pipeline.check import held
from autopar.pipeline.clock import Times, first_forwards
from autopar.pipeline.play import Costs, Timeline, play
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Signature
from autopar.pricing.memory import rank_memory, stage_bytes
from autopar.pricing.runs import Table, runs_of_kinds
from autopar.pricing.sends import Ends, Played, Sends, Sent, Timed
from autopar.pricing.software_step import blocking, gathering, slowed
from autopar.pricing.stage_time import StageTime, stage_time
from autopar.pricing.state import StateSharding
from autopar.pricing.step_time import StepTime, Sums, rank_times, step_time, sums_s
from autopar.pricing.units.held import StageBytes
from autopar.rules.fusion import ALONE


class Figure(IntEnum):
    """Of a stage: seconds of actions, of what comes once a step, and that its first forward takes
    more; bytes that it holds all the time, for each microbatch in flight, in passing, and for each
    microbatch whose weights alone are left to do. Where sequences pass in slices, behind these
    stand seconds that the forward, and the backward, of each takes more than that of a mean one.
    """

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2
    REDUCE = 3
    UPDATE = 4
    FIRST = 5
    STATE = 6
    SAVED = 7
    PASSING = 8
    PENDING = 9


class Choice(NamedTuple):
    """Of a stage; ``zero``: ZeRO level."""

    zero: int
    recompute: Recompute


def _backward_s(time: StageTime, splits: bool) -> tuple[Number, Number]:
    """Seconds of a backward, in one part or two, and of these the second."""
    if not splits:
        return time.backward_s, 0.0
    return time.backward_s + time.split_s, time.weights_s + time.split_s


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

    @property
    def alone(self) -> bool:
        """Whether the model is one stage, whose last gradients are reduced beside its backward."""
        return self.pp == 1

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
        return self.at(stage).bytes_of(first, end).saved

    @property
    def splits_backward(self) -> bool:
        """Whether I leaves the gradients of weights to W. Where a stage recomputes, or gathers its
        parameters for each pass, I does all of backward: in two parts it would do that twice; and
        a backward that `torch.compile` made is one function."""
        if self.state.trainer is not None:
            return True
        compiled = self.model.prices.fusion is not ALONE and self.model.framework != "jax"
        whole = self.state.split.parameters or compiled
        return not (self.recompute.runs_again or whole)

    def time(self, first: int, end: int) -> StageTime:
        key = self.model.cuts.signature(first, end)
        if key not in self._times:
            summary = self.model.stage_summary(first, end)
            beside = self.alone or self.state.trainer is not None
            self._times[key] = stage_time(summary, self.state, self.cluster, self.recompute, beside)
        return self._times[key]

    @property
    def sends(self) -> Sends:
        return self.model.cuts.sends(self.cluster, self.pp, self.state.mesh.device_count)

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
            more = (0.0, 0.0)
            if time.sliced_s:
                more = time.sliced_s[action.microbatch % schedule.slices]
            if action.kind == "F":
                return time.forward_s + more[0] + (time.first_s if action in first else 0.0)
            backward_s, weights_s = _backward_s(time, splits[action.stage])
            backward_s += more[1] if action.kind in "BI" else 0.0
            if action.kind == "W":
                return weights_s
            return backward_s - (weights_s if action.kind == "I" else 0.0)

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
        key = self.model.cuts.signature(first, end)
        if key not in self._figures:
            self._figures[key] = self._priced(first, end)
        return self._figures[key]

    def _priced(self, first: int, end: int) -> tuple[float, ...]:
        held = self.bytes_of(first, end)
        kept = held.parameters + held.gradients + held.optimizer + held.casts + held.gathered
        sliced_s = chain.from_iterable(zip(*self.time(first, end).sliced_s, strict=True))
        return (*self.seconds(first, end), kept, held.saved, held.passing, held.pending, *sliced_s)

    def seconds(self, first: int, end: int) -> tuple[Number, ...]:
        """Those of `figures` that are seconds."""
        time = self.time(first, end)
        backward_s, weights_s = _backward_s(time, self.splits_backward)
        update_s = time.update_s + time.late_s
        return time.forward_s, backward_s, weights_s, time.reduce_s, update_s, time.first_s

    def table(self) -> Table:
        """[figures, units + 1, units + 1] of every run of units."""
        of_state = [Figure.REDUCE, Figure.UPDATE, Figure.STATE]
        runs = runs_of_kinds(self.model.cuts.kinds)
        return runs.table(self.figures, [Figure.PASSING], of_state, self.model.cuts.ties)

    def clocked(
        self, runs: Sequence[tuple[int, int]], order: Played
    ) -> tuple[Number, list[Number]]:
        """Seconds of the timeline and of each rank's compute, as `play` has them."""
        if self.alone:
            return self._passed(self.time(*runs[0]), order.microbatches)
        each = [
            self.at(stage).figures(*run)
            if order.schedule.slices > 1
            else self.at(stage).seconds(*run)
            for stage, run in enumerate(runs)
        ]
        sent, trainer = self.sent(runs, order.schedule), self.state.trainer
        if trainer is None:
            times = clocked(order, table(each), sent)[1]
            return plain(times.step_s), [plain(busy) for busy in times.busy_s]
        each, first_s = gathering(trainer, order.schedule, each)
        if not trainer.software.p2p_overlap:
            each, sent = blocking(order.schedule, each, sent)
        times = clocked(order, table(each), sent)[1]
        apart = trainer.software.steps_overlap
        step_s = times.active_s.max(axis=0) if apart else times.step_s
        return plain(step_s) + first_s, [plain(busy) for busy in times.busy_s]

    @staticmethod
    def _passed(time: StageTime, microbatches: int) -> tuple[Number, list[Number]]:
        """One stage has nothing to wait for."""
        busy_s = time.first_s + microbatches * (time.forward_s + time.backward_s)
        return busy_s + time.reduce_s, [busy_s]

    def bytes_of(self, first: int, end: int) -> StageBytes:
        if self.state.trainer is not None:
            return self.model.stage_held(first, end)
        summary = self.model.stage_summary(first, end)
        return stage_bytes(summary, self.state, self.recompute, self.alone, self.splits_backward)

    def memory(
        self,
        runs: Sequence[tuple[int, int]],
        schedule: Schedule,
        peaks_of: Callable[[Sequence[int]], list[int]] | None = None,
    ) -> list[Memory]:
        """Of every rank. peaks_of: from what stages keep of a microbatch, the most that each rank
        holds, where the schedule stands for a longer one."""
        each = [self.at(stage).bytes_of(*run) for stage, run in enumerate(runs)]
        saved, pending = [stage.saved for stage in each], [stage.pending for stage in each]
        if self.alone:
            peaks = saved  # one microbatch is in flight
        elif peaks_of is not None:
            peaks = peaks_of(saved)
        else:
            other = pending.__getitem__ if pending != saved else None
            peaks = [int(peak) for peak in held(schedule, saved.__getitem__, other)]
        own = [
            [stage for i, stage in enumerate(each) if schedule.ranks[i] == rank]
            for rank in range(len(peaks))
        ]
        return [
            rank_memory(own[rank], peak, self.view(rank).device, self.state.trainer)
            for rank, peak in enumerate(peaks)
        ]

    def step(
        self,
        runs: Sequence[tuple[int, int]],
        schedule: Schedule,
        step_s: Number,
        busy_s: Sequence[Number],
        microbatches: int | None = None,
    ) -> StepTime:
        """A timeline of ``step_s`` in which ranks compute ``busy_s``, and what all do once.

        microbatches: of a schedule that stands for a longer one.
        """
        times = [self.at(stage).time(*run) for stage, run in enumerate(runs)]
        ranks = rank_times(times, schedule, microbatches or schedule.microbatches)
        views = [self.view(rank) for rank in range(len(ranks))]
        (whole,) = times if self.alone else (None,)
        beside_s = whole.computed_s[1] + whole.inline_s[1] if whole is not None else 0.0
        trainer = self.state.trainer
        if trainer is not None:
            return slowed(trainer, step_time(ranks, views, step_s, busy_s, Sums(0.0, 0.0, 0.0)))
        once = sums_s(self.model.summary, self.state, self.cluster, self.pp, beside_s)
        return step_time(ranks, views, step_s, busy_s, once)


def clocked(order: Played, figures: Table, sent: Sent) -> tuple[Timed, Times]:
    """What the schedule takes by ``figures`` [figures, stages, columns]."""
    clock = order.clock(sent.skips)
    forward, backward, weights = figures[: Figure.WEIGHTS + 1]
    slices, every = order.schedule.slices, list[Table]()
    more = figures[len(Figure) :] if slices > 1 else np.zeros((2, *forward.shape))
    for ahead, back in zip(more[:slices], more[slices:], strict=True):
        first = forward + ahead + figures[Figure.FIRST]
        inputs = backward + back - weights
        every += [forward + ahead, backward + back, inputs, weights, first]
    seconds = sent.between(order.schedule, clock.pairs)
    seconds = np.broadcast_to(seconds, (len(seconds), forward.shape[-1]))
    return clock, clock.times(np.stack(every, axis=1), seconds, figures[Figure.REDUCE])


def ends_of(runs: Sequence[tuple[int, int]], schedule: Schedule) -> Ends:
    """The inverse of `runs_of`."""
    return tuple(runs[stage][1] for stage in schedule.routes[0])


def runs_of(ends: Ends, schedule: Schedule) -> list[tuple[int, int]]:
    """(first unit, end) of every stage of the schedule, on both routes where there are two."""
    parts = list(zip((0, *ends), ends, strict=False))
    return [parts[schedule.part[stage]] for stage in range(len(schedule.ranks))]
