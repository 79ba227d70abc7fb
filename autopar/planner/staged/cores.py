"""The best cut and layout of state under one schedule, stages a rank and recomputation.

The cut is exact under the formula of a one-way pipeline (`autopar.pipeline.cuts`). Where there are
few, every cut is then played under the schedule itself; else units move from stage to stage as long
as the step gets shorter (the relief of bottlenecks of Aceso, Liu et al. 2024). First without data
traffic, which no layout of state can beat; then with the traffic and memory of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import comb

import numpy as np

from autopar.nouns.cluster import Cluster, Device
from autopar.nouns.plan import Stage
from autopar.nouns.recompute import POLICIES, Recompute
from autopar.nouns.zero import ZERO
from autopar.pipeline.cuts import Mask, NoCuts, cut
from autopar.planner.ask.candidates import StateLayout
from autopar.planner.ask.question import Answer, Question
from autopar.planner.solve.solved import state_of
from autopar.planner.staged.lightening import lightened
from autopar.planner.staged.pipeline_models import Model
from autopar.planner.staged.shapes import Core
from autopar.pricing.bounds import state_bytes
from autopar.pricing.memory import overhead
from autopar.pricing.pipeline import Choice, Figure, PipelinePrices, runs_of
from autopar.pricing.priced import priced
from autopar.pricing.runs import Table
from autopar.pricing.sends import Ends, Order, Sends
from autopar.pricing.stage_time import stage_time
from autopar.pricing.trials import Trial, figures_at, trials

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


@dataclass(slots=True)
class CoreTrials:
    """A core with the layouts of state that it may have, at least one."""

    question: Question
    core: Core
    model: Model
    order: Order
    layouts: Sequence[StateLayout]
    views: tuple[Cluster, ...] = field(init=False)
    """The cluster as every pipeline rank sees it; those that differ; of each rank which."""
    distinct: list[Cluster] = field(init=False)
    kinds: list[int] = field(init=False)
    _choices: dict[StateLayout, list[StateLayout]] = field(default_factory=dict)
    _prices: dict[StateLayout, PipelinePrices] = field(default_factory=dict)
    _tables: dict[StateLayout, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.views = self.core.shape.views(self.question.cluster)
        self.distinct = [*dict.fromkeys(self.views)]
        self.kinds = [self.distinct.index(view) for view in self.views]

    @property
    def stages(self) -> int:
        return len(self.order.schedule.routes[0])

    def plain(self) -> Trial:
        """The best cut without data traffic; under the formula of a one-way pipeline alone, where
        there are many."""
        tables = self._plain_tables()
        cuts = self._every() or [self._cut(tables[0])]
        return min(self._by_table(tables, cuts), key=lambda trial: trial.step_s)

    def relieved(self, plain: Trial) -> Trial:
        """``plain`` with units moved."""
        return plain if self._every() else self._moved(self._plain_tables(), plain, float("inf"))

    def answers(self, plain: Trial) -> Iterator[Answer]:
        """The best cut of each layout that is among the fastest; where none fits, the answer that
        needs least. ``plain``: the cut to start from."""
        schedule = self.order.schedule
        runs = runs_of(plain.ends, schedule)
        views = [self.views[rank] for rank in schedule.ranks]

        def figures(choice: StateLayout) -> Table:
            prices = self.prices(choice)
            stages = zip(views, runs, strict=True)
            return np.array([prices.on(view).figures(*run) for view, run in stages]).T

        every_choice = [[figures(one) for one in self.choices(layout)] for layout in self.layouts]
        most = max(map(len, every_choice))
        padded = [[*those, *those[-1:] * (most - len(those))] for those in every_choice]
        exact = [[*of] for of in zip(*padded, strict=True)]
        now = self._played([plain.ends] * len(self.layouts), exact)
        ranked = sorted(zip(now, self.layouts, strict=True), key=lambda pair: pair[0].step_s)
        every, fits = self._every(), False
        if every:
            for trial, layout in ranked:  # of the only cut, where there is no other
                alone = len(every) == 1
                options = [trial] if alone else self._by_table(self.tables(layout), every)
                for answer in self._fitting(layout, options):
                    fits = True
                    yield answer
        else:
            fitting = [pair for pair in ranked if pair[0].filled <= 1]
            for trial, layout in fitting[:LAYOUTS]:
                moved = self._moved(self.tables(layout), trial, 1.0)
                for answer in self._fitting(layout, [moved, trial]):
                    fits = True
                    yield answer
            if not fits:
                for answer in self._squeezed(ranked):
                    fits = True
                    yield answer
        if not fits:
            trial, layout = min(ranked, key=lambda pair: pair[0].filled)
            yield self.answer(layout, trial)

    def choices(self, layout: StateLayout) -> list[StateLayout]:
        """What a rank may choose under a layout: the fastest for all of the model first, the one
        that needs least memory last."""
        if layout not in self._choices:
            zeros = [layout.zero]
            free = self.core.recompute is None and self.question.pins.zero is None
            if free and layout.zero and self.question.framework == "torch":
                zeros = [*range(layout.zero, ZERO[-1].level + 1)]
            every = [
                replace(layout, zero=zero, recompute=recompute)
                for recompute in self.core.levels(self.question.policies)
                for zero in zeros
            ]
            first = sorted(every[:-1], key=self._alone_s)
            self._choices[layout] = [*first, every[-1]]
        return self._choices[layout]

    def _alone_s(self, choice: StateLayout) -> float:
        """Seconds of a step of all of the model as one stage."""
        solved, candidate = self.model.solved, self.core.shape.candidate
        state = state_of(self.question, choice, candidate)
        time = stage_time(solved.summary, state, self.question.cluster, choice.recompute)
        passes_s = candidate.passes * (time.forward_s + time.backward_s)
        return passes_s + time.first_s + time.reduce_s + time.update_s + time.late_s

    def prices(self, choice: StateLayout) -> PipelinePrices:
        if choice not in self._prices:
            shape = self.core.shape
            state = state_of(self.question, choice, shape.candidate)
            self._prices[choice] = self.model.staged(state, choice.recompute, shape.pp)
        return self._prices[choice]

    def tables(self, layout: StateLayout) -> list[Table]:
        """Figures of all runs on all kinds of devices, for what a rank may choose."""
        for choice in self.choices(layout):
            if choice not in self._tables:
                prices = self.prices(choice)
                every = [
                    self.model.table(prices.state, prices.recompute, prices.pp, view)
                    for view in self.distinct
                ]
                self._tables[choice] = np.stack(every)
        return [self._tables[choice] for choice in self.choices(layout)]

    def _plain_tables(self) -> list[Table]:
        """Without data traffic and without a limit of memory: nothing recomputes that need not."""
        least = self.core.lightest
        return [np.stack([self.model.plain(least, view) for view in self.distinct])]

    @property
    def _sends(self) -> Sends:
        return self.prices(self.layouts[0]).sends

    def _every(self) -> list[Ends]:
        """All cuts, where they are few."""
        units, actions = len(self.model.cuts.units), sum(map(len, self.order.schedule.lists))
        count = comb(units - 1, self.stages - 1)
        if count > FEW_CUTS or count * actions > FEW_ACTIONS:
            return []
        return [(*inner, units) for inner in combinations(range(1, units), self.stages - 1)]

    def _cut(self, tables: Table, allowed: list[Mask] | None = None) -> Ends:
        busy = list(tables[:, Figure.FORWARD] + tables[:, Figure.BACKWARD])
        schedule, sends = self.order.schedule, self._sends
        ranks = [schedule.ranks[stage] for stage in schedule.routes[0]]
        links = [int(sends.links[a, b]) for a, b in pairwise((*ranks, ranks[-1]))]
        kinds = [(self.kinds[rank], link) for rank, link in zip(ranks, links, strict=True)]
        fill = {
            (kind, link): busy[kind] + 2 * sends.crossing_s[link][None, :]
            for kind, link in dict.fromkeys(kinds)
        }
        m = self.core.shape.candidate.passes
        return cut([busy[kind] for kind, _ in kinds], [fill[key] for key in kinds], m, allowed).ends

    def _by_table(self, tables: Sequence[Table], cuts: Sequence[Ends]) -> list[Trial]:
        schedule = self.order.schedule
        figures = [
            [figures_at(table, ends, schedule, self.kinds) for ends in cuts] for table in tables
        ]
        return self._played(cuts, figures)

    def _played(self, cuts: Sequence[Ends], figures: Sequence[Sequence[Table]]) -> list[Trial]:
        packages = self.model.cuts.summary.packages
        return trials(self.order, self._sends, cuts, figures, self._devices, packages)

    @property
    def _devices(self) -> list[Device]:
        """Of every pipeline rank."""
        return [view.device for view in self.views]

    def _moved(self, tables: Sequence[Table], best: Trial, most: float) -> Trial:
        """``most``: of its memory, what a rank may need."""
        for _ in range(MOVES):
            moves = [*_moves(best.ends)]
            options = self._by_table(tables, moves) if moves else []  # a unit a stage: none moves
            fitting = [option for option in options if option.filled <= most]
            faster = min(fitting, key=lambda option: option.step_s, default=best)
            if faster.step_s >= best.step_s * (1 - 1e-9):
                break
            best = faster
        return best

    def _squeezed(self, ranked: Sequence[tuple[Trial, StateLayout]]) -> Iterator[Answer]:
        """The first layout that fits under cuts which mind the memory of each rank."""
        near = [layout for trial, layout in ranked if trial.filled <= SQUEEZED]
        for layout in near[:LAYOUTS]:
            ends = self._cut_within(layout, 1.0)
            if ends is None:
                continue
            tables = self.tables(layout)
            (trial,) = self._by_table(tables, [ends])
            moved = self._moved(tables, trial, 1.0)
            for answer in self._fitting(layout, [moved, trial]):
                yield answer
                return

    def tightest(self, plain: Trial) -> Answer:
        """Of the layout that needs least the cut whose fullest rank needs least, to a percent."""
        schedule = self.order.schedule
        runs = runs_of(plain.ends, schedule)
        needs = {}
        for layout in self.layouts:
            prices = self.prices(self.choices(layout)[-1]).staged(schedule)
            needs[layout] = max(memory.filled for memory in prices.memory(runs, schedule))
        layout = min(needs, key=needs.__getitem__)
        low, high, best = 0.0, needs[layout], plain.ends
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            ends = self._cut_within(layout, middle)
            if ends is None:
                low = middle
            else:
                high, best = middle, ends
        last = len(self.choices(layout)) - 1
        return self.answer(layout, replace(plain, ends=best, chosen=(last,) * len(runs)))

    def _cut_within(self, layout: StateLayout, most: float) -> Ends | None:
        """The best cut whose ranks need no more of their memory than ``most``, if each holds as
        much as its fullest stage."""
        schedule, packages = self.order.schedule, self.model.cuts.summary.packages
        each = len(schedule.ranks) // len(schedule.lists)
        clock = self.order.clock(())
        passes = clock.peaks(np.eye(len(schedule.ranks))).max(axis=0)  # of each stage
        tables = self.tables(layout)[-1]
        masks: dict[tuple[int, int], Mask] = {}

        def mask(stage: int) -> Mask:
            kind, count = self.kinds[schedule.ranks[stage]], int(passes[stage])
            if (kind, count) not in masks:
                device, table = self.distinct[kind].device, tables[kind]
                share, process = overhead(packages, device)
                room = (most * device.memory_bytes - process) / (1 + share)
                held = table[Figure.STATE] + count * table[Figure.SAVED]
                masks[kind, count] = each * held + table[Figure.PASSING] <= room
            return masks[kind, count]

        try:
            return self._cut(tables, [mask(stage) for stage in schedule.routes[0]])
        except NoCuts:
            return None

    def _fitting(self, layout: StateLayout, options: Sequence[Trial]) -> Iterator[Answer]:
        """The fastest of them that fits, priced in full."""
        fitting = [trial for trial in options if trial.filled <= 1]
        for trial in sorted(fitting, key=lambda trial: trial.step_s)[:2]:
            answer = self.answer(layout, trial)
            if answer.priced.memory.fits:
                yield answer
                return

    def answer(self, layout: StateLayout, trial: Trial) -> Answer:
        """The trial priced in full."""
        choices = self.choices(layout)
        each = [choices[min(place, len(choices) - 1)] for place in trial.chosen]
        schedule, own = self.order.schedule, [Choice(one.zero, one.recompute) for one in each]
        if self.core.recompute is None and self.question.framework == "torch":
            own = lightened(self.prices(each[0]), own, runs_of(trial.ends, schedule), schedule)
        layout = replace(
            layout,
            zero=max(zero for zero, _ in own),
            recompute=Recompute(max((one.recompute.policy for one in own), key=POLICIES.index)),
        )
        prices, runs = self.prices(layout).staged(schedule, own), runs_of(trial.ends, schedule)
        decided = self.model.solved.decided(self.core.shape.candidate, layout)
        stages = tuple(
            Stage(
                first=prices.model.units[runs[stage][0]] if runs[stage][0] else "",
                device=schedule.ranks[stage] * decided.spread.mesh.device_count,
                zero=own[stage].zero,
                recompute=own[stage].recompute,
                offload=layout.offload,
            )
            for stage in schedule.routes[0]
        )
        decided = replace(decided, stages=stages, order=self.order)
        state = state_bytes(self.question.graph)
        return Answer(decided, priced(prices, self.order, trial.ends, state))


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
