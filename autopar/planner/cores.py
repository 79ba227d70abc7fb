"""The best cut and layout of state under one schedule, stages a rank and recomputation.

The cut is exact under the formula of a one-way pipeline (`autopar.pipeline.cuts`). Where there are
few, every cut is then played under the schedule itself; else units move from stage to stage as long
as the step gets shorter (the relief of bottlenecks of Aceso, Liu et al. 2024). First without data
traffic, which no layout of state can beat; then with the traffic and memory of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import comb

import numpy as np

from autopar.cost_models.physics import check
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import RECOMPUTE, Memory, Stage
from autopar.nouns.zero import ZERO
from autopar.pipeline.actions import to_text
from autopar.pipeline.cuts import Mask, NoCuts, cut
from autopar.planner.candidates import Candidate, Layout
from autopar.planner.pricing.bounds import pipeline_bounds, state_bytes
from autopar.planner.pricing.memory import overhead
from autopar.planner.pricing.pipeline import CutModel, Figure, PipelinePrices, runs_of
from autopar.planner.pricing.runs import Table
from autopar.planner.pricing.sends import Ends, Order, Sends
from autopar.planner.pricing.simulation import StageTime, StepTime, stage_time
from autopar.planner.pricing.state import StateSharding
from autopar.planner.pricing.trials import Trial, figures_at, trials
from autopar.planner.question import Answer, Question
from autopar.planner.solved import Solved, state_of

MOVES = 4
"""Rounds of moving cuts unit by unit."""
FAR = 16
"""Stages up to which the cuts between two stages move together."""
FEW_CUTS, FEW_ACTIONS = 300, 200_000
"""Cuts, and actions of all of them, up to which every cut of a core is played."""
LAYOUTS = 3
"""Layouts of a core whose cuts are looked at again, the fastest first."""
SQUEEZED = 1.25
"""Of its memory limit, what a rank may need for other cuts to be tried."""


BY_RANK = "by rank"
"""Ranks recompute as they must, each for itself (Sun et al. 2024, AdaPipe)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``samples``: of one microbatch on one data rank."""

    pp: int
    candidate: Candidate
    samples: int


@dataclass(frozen=True, slots=True)
class Core:
    """A schedule of a shape.

    depth: as `Fixed.interleave`. limit: microbatches that a rank may hold, of a schedule that is
    found. recompute: of every rank, or `BY_RANK`: as much as its memory makes it.
    """

    shape: Shape
    name: str
    depth: int
    recompute: str
    limit: int = 0

    @property
    def levels(self) -> tuple[str, ...]:
        """What a rank may choose, the one that keeps most first."""
        return RECOMPUTE if self.recompute == BY_RANK else (self.recompute,)


@dataclass(frozen=True, slots=True)
class Whole:
    """All of a model as one stage under a layout: bytes of its state."""

    state: StateSharding
    state_bytes: int


@dataclass(slots=True)
class Model:
    """A solved sharding, for every shape with as many samples on as many tensor-parallel ranks.

    whole: all of the model as one stage without data traffic, by recomputation; alone: its stages.
    """

    solved: Solved
    cuts: CutModel
    whole: dict[str, StageTime]
    alone: dict[str, PipelinePrices]
    layouts: dict[tuple[int, str], list[Whole]] = field(default_factory=dict)
    """All of the model under each layout of state, by data ranks and recomputation."""
    _plain: dict[str, Table] = field(default_factory=dict)
    _pass_s: dict[tuple[StateSharding, str], float] = field(default_factory=dict)

    @property
    def pass_s(self) -> float:
        """Forward and backward of one microbatch through all of the model."""
        return self.whole["none"].forward_s + self.whole["none"].backward_s

    def least_pass_s(self, fitting: Sequence[Whole], recompute: str, cluster: Cluster) -> float:
        """Forward and backward of one microbatch through all of the model, in the layout that moves
        least state with it."""
        whole = self.whole[recompute]
        if any(not ZERO[one.state.zero].gradients for one in fitting):
            return whole.forward_s + whole.backward_s  # moves none
        for one in fitting:
            if (one.state, recompute) not in self._pass_s:
                time = stage_time(self.solved.summary, one.state, cluster, recompute)
                self._pass_s[one.state, recompute] = time.forward_s + time.backward_s
        return min(self._pass_s[one.state, recompute] for one in fitting)

    def plain(self, recompute: str) -> Table:
        """Figures of all runs without data traffic and optimizer: no layout takes less."""
        if recompute not in self._plain:
            table = self._plain[recompute] = self.alone[recompute].table()
            table[[Figure.REDUCE, Figure.UPDATE]] = 0.0
        return self._plain[recompute]


@dataclass(slots=True)
class CoreTrials:
    """A core with the layouts of state that it may have, at least one."""

    question: Question
    core: Core
    model: Model
    order: Order
    layouts: Sequence[Layout]
    _prices: dict[tuple[Layout, str], PipelinePrices] = field(default_factory=dict)
    _tables: dict[tuple[Layout, str], Table] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.order.schedule.routes[0])

    def plain(self) -> Trial:
        """The best cut without data traffic; under the formula of a one-way pipeline alone, where
        there are many."""
        tables = self._plain_tables()
        cuts = self._every() or [self._cut(tables[self.core.levels[0]])]
        return min(self._by_table(tables, cuts), key=lambda trial: trial.step_s)

    def relieved(self, plain: Trial) -> Trial:
        """``plain`` with units moved."""
        return plain if self._every() else self._moved(self._plain_tables(), plain, float("inf"))

    def answers(self, plain: Trial) -> Iterator[Answer]:
        """The best cut of each layout that is among the fastest; where none fits, the answer that
        needs least. ``plain``: the cut to start from."""
        limit = self.question.cluster.device.memory_bytes
        runs = runs_of(plain.ends, self.order.schedule)
        exact = {
            recompute: [
                np.array([self.prices(layout, recompute).figures(*run) for run in runs]).T
                for layout in self.layouts
            ]
            for recompute in self.core.levels
        }
        now = self._played([plain.ends] * len(self.layouts), exact)
        ranked = sorted(zip(now, self.layouts, strict=True), key=lambda pair: pair[0].step_s)
        every, fits = self._every(), False
        if every:
            for _, layout in ranked:
                options = self._by_table(self.tables(layout), every)
                for answer in self._fitting(layout, options):
                    fits = True
                    yield answer
        else:
            fitting = [pair for pair in ranked if pair[0].memory_bytes <= limit]
            for trial, layout in fitting[:LAYOUTS]:
                moved = self._moved(self.tables(layout), trial, limit)
                for answer in self._fitting(layout, [moved, trial]):
                    fits = True
                    yield answer
            if not fits:
                for answer in self._squeezed(ranked):
                    fits = True
                    yield answer
        if not fits:
            trial, layout = min(ranked, key=lambda pair: pair[0].memory_bytes)
            yield self.answer(layout, trial)

    def prices(self, layout: Layout, recompute: str) -> PipelinePrices:
        key = layout, recompute
        if key not in self._prices:
            state = state_of(self.question, layout, self.core.shape.candidate)
            self._prices[key] = PipelinePrices(
                self.model.cuts, self.question.cluster, state, recompute, self.core.shape.pp
            )
        return self._prices[key]

    def tables(self, layout: Layout) -> dict[str, Table]:
        """Figures of all runs, for what a rank may choose."""
        for recompute in self.core.levels:
            if (layout, recompute) not in self._tables:
                self._tables[layout, recompute] = self.prices(layout, recompute).table()
        return {recompute: self._tables[layout, recompute] for recompute in self.core.levels}

    def _plain_tables(self) -> dict[str, Table]:
        """Without data traffic and without a limit of memory: nothing recomputes that need not."""
        least = self.core.levels[0]
        return {least: self.model.plain(least)}

    @property
    def _sends(self) -> Sends:
        return self.prices(self.layouts[0], self.core.levels[0]).sends

    def _every(self) -> list[Ends]:
        """All cuts, where they are few."""
        units, actions = len(self.model.cuts.units), sum(map(len, self.order.schedule.lists))
        count = comb(units - 1, self.stages - 1)
        if count > FEW_CUTS or count * actions > FEW_ACTIONS:
            return []
        return [(*inner, units) for inner in combinations(range(1, units), self.stages - 1)]

    def _cut(self, table: Table, allowed: list[Mask] | None = None) -> Ends:
        busy = table[Figure.FORWARD] + table[Figure.BACKWARD]
        fill = busy + 2 * self._sends.crossing_s[None, :]
        m = self.core.shape.candidate.microbatches
        return cut(busy, fill, self.stages, m, allowed).ends

    def _by_table(self, tables: Mapping[str, Table], cuts: Sequence[Ends]) -> list[Trial]:
        schedule = self.order.schedule
        figures = {
            recompute: [figures_at(table, ends, schedule) for ends in cuts]
            for recompute, table in tables.items()
        }
        return self._played(cuts, figures)

    def _played(self, cuts: Sequence[Ends], figures: Mapping[str, Sequence[Table]]) -> list[Trial]:
        device, packages = self.question.cluster.device, self.model.cuts.summary.packages
        return trials(self.order, self._sends, cuts, figures, device, packages)

    def _moved(self, tables: Mapping[str, Table], best: Trial, limit: float) -> Trial:
        for _ in range(MOVES):
            options = self._by_table(tables, [*_moves(best.ends)])
            fitting = [option for option in options if option.memory_bytes <= limit]
            faster = min(fitting, key=lambda option: option.step_s, default=best)
            if faster.step_s >= best.step_s * (1 - 1e-9):
                break
            best = faster
        return best

    def _squeezed(self, ranked: Sequence[tuple[Trial, Layout]]) -> Iterator[Answer]:
        """The first layout that fits under cuts which mind the memory of each rank."""
        device = self.question.cluster.device
        near = [layout for t, layout in ranked if t.memory_bytes <= SQUEEZED * device.memory_bytes]
        for layout in near[:LAYOUTS]:
            ends = self._cut_within(layout, device.memory_bytes)
            if ends is None:
                continue
            tables = self.tables(layout)
            (trial,) = self._by_table(tables, [ends])
            moved = self._moved(tables, trial, device.memory_bytes)
            for answer in self._fitting(layout, [moved, trial]):
                yield answer
                return

    def tightest(self, plain: Trial) -> Answer:
        """Of the layout that needs least the cut whose fullest rank needs least, to a percent."""
        runs = runs_of(plain.ends, self.order.schedule)
        least = self.core.levels[-1]
        needs = {
            layout: max(
                memory.total
                for memory in self.prices(layout, least).memory(runs, self.order.schedule)
            )
            for layout in self.layouts
        }
        layout = min(needs, key=needs.__getitem__)
        low, high, best = 0.0, float(needs[layout]), plain.ends
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            ends = self._cut_within(layout, middle)
            if ends is None:
                low = middle
            else:
                high, best = middle, ends
        return self.answer(layout, replace(plain, ends=best, recompute=(least,) * len(runs)))

    def _cut_within(self, layout: Layout, memory_bytes: float) -> Ends | None:
        """The best cut whose ranks need no more, if each holds as much as its fullest stage."""
        device, schedule = self.question.cluster.device, self.order.schedule
        share, process = overhead(self.model.cuts.summary.packages, device)
        room = (memory_bytes - process) / (1 + share)
        each = len(schedule.ranks) // len(schedule.lists)
        clock = self.order.clock(())
        passes = clock.peaks(np.eye(len(schedule.ranks))).max(axis=0)  # of each stage
        table = self.tables(layout)[self.core.levels[-1]]
        needed = {
            count: each * (table[Figure.STATE] + count * table[Figure.SAVED])
            + table[Figure.PASSING]
            for count in set(passes.tolist())
        }
        masks = {count: bytes_ <= room for count, bytes_ in needed.items()}
        try:
            return self._cut(table, [masks[passes[stage]] for stage in schedule.routes[0]])
        except NoCuts:
            return None

    def _fitting(self, layout: Layout, options: Sequence[Trial]) -> Iterator[Answer]:
        """The fastest of them that fits, priced in full."""
        limit = self.question.cluster.device.memory_bytes
        fitting = [trial for trial in options if trial.memory_bytes <= limit]
        for trial in sorted(fitting, key=lambda trial: trial.step_s)[:2]:
            answer = self.answer(layout, trial)
            if answer.memory.total <= answer.memory.limit:
                yield answer
                return

    def answer(self, layout: Layout, trial: Trial) -> Answer:
        """The trial priced in full."""
        layout = replace(layout, recompute=max(trial.recompute, key=RECOMPUTE.index))
        prices = self.prices(layout, layout.recompute).recomputing(trial.recompute)
        solved, candidate = self.model.solved, self.core.shape.candidate
        blank = Answer(
            candidate,
            layout,
            replace(solved.spread, mesh=layout.mesh(candidate.tp)),
            solved.lowered,
            StepTime(0, 0, 0, 0, 0, 0, 0, 0),
            Memory(0, 0, 0, 0, 0, 0, 0),
            solved.solution,
            solved.solution.cost,
            0.0,
        )
        return piped(self.question, blank, prices, self.order, trial.ends)


def piped(
    question: Question, known: Answer, prices: PipelinePrices, order: Order, ends: Ends
) -> Answer:
    """``known`` with this cut and schedule, and all that is predicted of them."""
    schedule, layout = order.schedule, known.layout
    each = known.spread.mesh.device_count
    runs = runs_of(ends, schedule)
    units = prices.model.units
    stages = tuple(
        Stage(
            first=units[runs[stage][0]] if runs[stage][0] else "",
            device=schedule.ranks[stage] * each,
            zero=layout.zero,
            recompute=prices.at(stage).recompute,
        )
        for stage in schedule.routes[0]
    )
    ranks = prices.memory(runs, schedule)
    check(pipeline_bounds(ranks, each, state_bytes(question.graph)))
    time = prices.step(runs, schedule, *prices.clocked(runs, order))
    memory = max(ranks, key=lambda memory: memory.total)
    return replace(
        known,
        time=time,
        memory=memory,
        stages=stages,
        schedule=schedule.name,
        actions=tuple(to_text(schedule.lists).split("\n")) if order.written else (),
    )


def _moves(ends: Ends) -> Iterator[Ends]:
    """A unit given to a stage near by, those between shift."""
    cuts = len(ends) - 1
    far = 4 if cuts < FAR else 1
    for i in range(cuts):
        for j in range(i, min(cuts, i + far)):
            for step in (-1, 1):
                moved = (*ends[:i], *(end + step for end in ends[i : j + 1]), *ends[j + 1 :])
                if all(a < b for a, b in pairwise((0, *moved))):
                    yield moved
