"""Plans of several stages: where the model is cut, in which order ranks work, what each recomputes.

The sharding of all ops is solved once for each (tensor-parallel degree, microbatches) on the mesh
of one stage, not for each stage, cut or schedule: stages of equal meshes share a spread. The cut is
exact under the formula of a one-way pipeline (`autopar.pipeline.cuts`). Where there are few, every
cut is then played under the schedule itself; else units move from stage to stage as long as the
timeline gets shorter (the relief of bottlenecks of Aceso, Liu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import comb

from autopar.cost_models.physics import check
from autopar.nouns.plan import Stage
from autopar.pipeline.actions import Schedule, ScheduleError
from autopar.pipeline.check import held
from autopar.pipeline.cuts import NoCuts, StagePrice, cut
from autopar.pipeline.play import Timeline
from autopar.pipeline.schedules.table import SCHEDULES, schedule
from autopar.planner.candidates import Layout, candidates, layouts
from autopar.planner.fixed import FixError
from autopar.planner.pricing.bounds import pipeline_bounds, state_bytes
from autopar.planner.pricing.pipeline import CutModel, Ends, PipelinePrices, runs_of
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.solving import Solver
from autopar.planner.question import Answer, Outcome, Question
from autopar.planner.solved import Solved, solve, state_of
from autopar.planner.standings import Standings, too_big

Progress = Callable[[str], None]

USUAL = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
"""Schedules that are tried where none is pinned: by depth of memory and of bubble."""
MOVES = 4
"""Rounds of moving cuts unit by unit."""
FAR_ACTIONS = 10_000
"""Actions that may be played in trying every cut, or in a round in which units move to any stage:
about half a second."""


def search_pipelines(question: Question, progress: Progress = lambda _: None) -> Outcome:
    """The fastest plan of ``question.fixed.pp`` pipeline ranks that fits.

    Raises:
        DoesNotFit: none does; says what is short.
        FixError: the batch, the pins, the schedule and the devices do not go together.
    """
    pp = question.fixed.pp or 1
    solver = Solver(question.searcher, progress, question.verbose)
    standings = Standings()
    listed = candidates(question.cluster.device_count // pp, question.batch, question.fixed)
    if not question.splits_batch or question.obstacles:
        raise FixError(
            f"--fix pp={pp} cuts the batch into microbatches, and this one cannot be: "
            f"{next(iter(question.obstacles), 'no entry of it has a batch dim')}"
        )
    schedules = [*_schedules(question, {c.microbatches for c in listed})]
    tried, short = 0, ""
    whole = state_bytes(question.graph)
    bound_s = float("inf")
    for candidate in listed:
        fitting = [s for s in schedules if s.microbatches == candidate.microbatches]
        solved = solve(question, candidate, solver) if fitting else None
        solver.check()
        if solved is None:
            continue
        tried += 1
        bound_s = min(bound_s, solved.bound_s / pp)
        if standings.beats(solved.bound_s / pp):
            continue
        prices = Prices(question.cluster, solved.lowered.mesh, question.precision, question.fusion)
        model = CutModel(solved.lowered, solved.summary, prices, question.framework)
        for layout in layouts(candidate.data, question.fixed):
            state = state_of(question, layout, candidate)
            priced = PipelinePrices(model, question.cluster, state, layout.recompute, pp)
            pipeline = _Pipeline(solved, layout, priced, whole)
            for found in fitting:
                best = standings.best
                try:
                    answer = pipeline.answer(found, best.time.total_s if best else float("inf"))
                except NoCuts as error:
                    short = str(error)
                    continue
                if answer is not None:
                    standings.offer(answer)
    if standings.best is None:
        if standings.tightest is None:
            raise FixError(
                f"--fix pp={pp}: {short or 'the model cannot be split so'}"
                "; take fewer ranks, or less of interleave"
            )
        raise too_big(standings, question.cluster, len(listed))
    best = standings.best
    return Outcome(
        best=best,
        lower_bound_s=min(bound_s, best.time.total_s),
        runners_up=standings.runners_up(best),
        tried=tried,
    )


def _schedules(question: Question, microbatches: set[int]) -> Iterator[Schedule]:
    """Every schedule that the pins leave for these numbers of microbatches.

    Raises `FixError` where there is none, with what one of them asks for.
    """
    fixed = question.fixed
    pp = fixed.pp or 1
    names = USUAL if fixed.schedule is None else (fixed.schedule,)
    refused = ""
    some = False
    for name in names:
        depths = [fixed.interleave] if fixed.interleave else [1]
        if not fixed.interleave and SCHEDULES[name].interleaves:
            depths = [2] if SCHEDULES[name].stages == 1 else [1]
        for depth in depths:
            for count in sorted(microbatches):
                try:
                    yield schedule(name, pp, count, depth)
                    some = True
                except ScheduleError as error:
                    refused = str(error)
    if not some:
        raise FixError(f"--fix pp={pp}: {refused}")


@dataclass(slots=True)
class _Pipeline:
    """A solved candidate under one layout of state."""

    solved: Solved
    layout: Layout
    prices: PipelinePrices
    state: tuple[int, int]
    """Bytes of the whole model's parameters and gradients."""

    def answer(self, found: Schedule, best_s: float) -> Answer | None:
        """The best cut for a schedule; None where it takes more than ``best_s``.

        Raises `NoCuts`.
        """
        count = len(found.routes[0])
        ends = self._cut(count, found, limited=True)
        fits = ends is not None
        if ends is None:
            ends = self._cut(count, found, limited=False)
            assert ends is not None
        if fits and self._least_s(ends, found) >= best_s:
            return None
        timeline = self.prices.play(runs_of(ends, found), found)
        units, actions = len(self.prices.model.units), sum(map(len, found.lists))
        every = comb(units - 1, count - 1) * actions <= FAR_ACTIONS
        far = count * count * actions <= FAR_ACTIONS
        for _ in range(1 if every else MOVES):
            before = ends
            for other in _every(units, count) if every else _moved(ends, far):
                if self._least_s(other, found) >= timeline.step_s:
                    continue
                again = self.prices.play(runs_of(other, found), found)
                faster = again.step_s < timeline.step_s * (1 - 1e-9)
                if faster and (not fits or self._fits(other, found)):
                    ends, timeline = other, again
            if ends == before:
                break
        return self._answer(ends, timeline, found)

    def _cut(self, count: int, found: Schedule, limited: bool) -> Ends | None:
        """Ends of the stages; None where nothing fits under ``limited``."""
        depth = held(found)
        model = self.prices.model

        def price(stage: int, first: int, end: int) -> StagePrice | None:
            if limited:
                passes = int(depth[found.ranks[stage]])
                memory = self.prices.memory_of(first, end, passes)
                if memory.total > memory.limit:
                    return None
            time = self.prices.time(first, end)
            busy = time.forward_s + time.backward_s
            part = model.part(first, end)
            return StagePrice(busy, busy + 2 * self.prices.send_s(part, part.gives))

        try:
            return cut(len(model.units), count, found.microbatches, price).ends
        except NoCuts:
            if not limited or count > len(model.units):
                raise
            return None

    def _least_s(self, ends: Ends, found: Schedule) -> float:
        """No timeline is shorter: the busiest rank's work."""
        passes = found.microbatches / len(found.routes)
        busy = [0.0] * len(found.lists)
        for stage, run in enumerate(runs_of(ends, found)):
            time = self.prices.time(*run)
            busy[found.ranks[stage]] += (time.forward_s + time.backward_s) * passes
        return max(busy)

    def _fits(self, ends: Ends, found: Schedule) -> bool:
        return all(m.total <= m.limit for m in self.prices.memory(runs_of(ends, found), found))

    def _answer(self, ends: Ends, timeline: Timeline, found: Schedule) -> Answer:
        mesh = self.layout.mesh(self.solved.candidate.tp)
        runs = runs_of(ends, found)
        units = self.prices.model.units
        stages = tuple(
            Stage(
                first=units[runs[stage][0]] if runs[stage][0] else "",
                device=found.ranks[stage] * mesh.device_count,
                zero=self.layout.zero,
                recompute=self.layout.recompute,
            )
            for stage in found.routes[0]
        )
        ranks = self.prices.memory(runs, found)
        check(pipeline_bounds(ranks, mesh.device_count, self.state))
        return Answer(
            self.solved.candidate,
            self.layout,
            replace(self.solved.spread, mesh=mesh),
            self.solved.lowered,
            self.prices.step(runs, found, timeline),
            max(ranks, key=lambda memory: memory.total),
            self.solved.solution,
            self.solved.solution.cost,
            0.0,
            stages,
            found.name,
        )


def _moved(ends: Ends, far: bool) -> Iterator[Ends]:
    """A unit given to the stage before or behind; ``far``: to any stage, those between shift."""
    cuts = len(ends) - 1
    for i in range(cuts):
        for j in range(i, cuts if far else i + 1):
            for step in (-1, 1):
                moved = (*ends[:i], *(end + step for end in ends[i : j + 1]), *ends[j + 1 :])
                if all(a < b for a, b in pairwise((0, *moved))):
                    yield moved


def _every(units: int, stages: int) -> Iterator[Ends]:
    """All cuts into stages that are not empty."""
    for inner in combinations(range(1, units), stages - 1):
        yield (*inner, units)
