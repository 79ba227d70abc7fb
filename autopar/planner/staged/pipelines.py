"""The search over plans of several stages, best first.

Shardings are solved apart (`staged.pipeline_models`). What is left is searched by lower bounds
(`staged.lower_bounds`): a *shape* (pipeline ranks, tensor-parallel degree, samples) opens into
*cores* (schedule, stages a rank, recomputation); a core is played in its order of actions
(`staged.orders`) without data traffic, and its step is the next bound; then with the layouts of
state (`staged.cores`). The search ends where no bound is below the best plan.

What is not looked at: deeper schedules of several stages a rank once they take `RELIEF` longer;
again, cuts that take so much more than the best plan; cores, and where devices are alike layouts
of state, whose ranks would need `lower_bounds.SPARE` times their memory if all had as much of the
model.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product

from autopar.nouns.layout import LayoutError
from autopar.nouns.recompute import FULL, Recompute
from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.planner.ask.candidates import NOTHING_SHARED, Candidate, Sharing, candidates
from autopar.planner.ask.pins import allows, splits
from autopar.planner.ask.question import Question
from autopar.planner.problem.solving import Solver
from autopar.planner.solve.solved import Solved
from autopar.planner.solve.standings import Standings, Steps, beat, offer, offers, refuse
from autopar.planner.staged.cores import CoreTrials
from autopar.planner.staged.lower_bounds import LowerBounds, Share
from autopar.planner.staged.orders import Orders
from autopar.planner.staged.pipeline_models import Model, Models
from autopar.planner.staged.schedules import (
    DEPTHS,
    USUAL,
    check_core,
    cores_of,
    possible_cores,
    too_many,
)
from autopar.planner.staged.shapes import FASTEST, LEAN, Core, Shape
from autopar.pricing.trials import Trial

TIGHTEST = 12
"""Pipelines that are priced in full where nothing fits."""
FILLED = 0.9
"""Of its memory, what a plan must take for it to bind."""
SLOWED = 1.1
"""Times what a core takes without state that moves, what it must take with that which fits for a
leaner sharding to be tried."""
RELIEF = 0.1
"""What moving units between stages is taken to gain at most."""


@dataclass(frozen=True, slots=True)
class Played:
    """A core with its best cut without data traffic."""

    trials: CoreTrials
    plain: Trial


Item = Shape | Core | Played
Opened = tuple[float, Item]
"""With a lower bound of its step, in seconds."""


@dataclass(slots=True)
class Pipelines:
    """The search, with what is kept of shardings and orders that it has made. ``sharing``: what
    ranks may share where that is not pinned."""

    question: Question
    solver: Solver
    sharing: Sharing = NOTHING_SHARED
    _models: Models = field(init=False)
    _bounds: LowerBounds = field(init=False)
    _orders: Orders = field(init=False)
    _too_big: list[tuple[float, Core]] = field(default_factory=list)
    """Cores that are not tried, and the bytes that they need."""
    _steps: dict[Core, float] = field(default_factory=dict)
    """Seconds of those that were played."""
    _crowded: set[Shape] = field(default_factory=set)
    """Shapes whose ranks are short of memory, or whose state moves long."""
    _leaned: set[Shape] = field(default_factory=set)
    """Those of them that came up as leaner ones."""

    def __post_init__(self) -> None:
        self._models = Models(self.question, self.solver)
        self._bounds = LowerBounds(self.question, self._models)
        self._orders = Orders(self.question)

    def search(self, degrees: Sequence[int], known: Sequence[Solved], now: Standings) -> Steps:
        """Offers what may win, and gives the standings after each step. ``known``: solved
        candidates of one stage."""
        shapes: list[Shape] = []
        for pp in degrees:
            try:
                shapes += self._shapes(pp)
            except LayoutError as error:
                now = refuse(now, error)
        yield now
        if not shapes:
            return now
        for solved in known:
            if not solved.repeats:
                self._models.add(solved)
        self._models.solve_alone(max(shape.samples for shape in shapes))
        for part in (self._dive, self._best_first, self._squeeze, self._relieve):
            now = yield from part(shapes, now)
        return now

    def _best_first(self, shapes: Sequence[Shape], now: Standings) -> Steps:
        turn = count()
        heap: list[tuple[float, int, Item]] = [
            (self._bounds.shape_s(shape), next(turn), shape) for shape in shapes
        ]
        heapq.heapify(heap)
        while heap:
            bound_s, _, item = heapq.heappop(heap)
            if isinstance(item, Shape):
                again_s = self._bounds.shape_s(item)
                if again_s > bound_s:  # another shape has been solved since
                    heapq.heappush(heap, (again_s, next(turn), item))
                    continue
            now = replace(now, bound_s=min(now.bound_s, bound_s))
            if bound_s >= now.best_s:
                shape = _shape(item)
                now = beat(now, shape.candidate, bound_s, shape.pp)
                break
            self.solver.check()
            opened: list[Opened] = []
            if isinstance(item, Shape):
                now, opened = self._open(item, now)
            elif isinstance(item, Core):
                now, opened = self._play(item, now)
            else:
                now = yield from self._offer(item, now)
                opened = self._leaner(item.trials.core.shape, bound_s)
            yield now
            for next_s, one in opened:
                # What bounds a shape may not bound it leaner: such a one comes up at once.
                own = isinstance(item, Shape) and item.lean != FASTEST
                least_s = bound_s if isinstance(one, Shape) else max(next_s, 0 if own else bound_s)
                heapq.heappush(heap, (least_s, next(turn), one))
        yield now
        return now

    def _squeeze(self, shapes: Sequence[Shape], now: Standings) -> Steps:
        """Where nothing fits: prices the pipelines that may need least."""
        if now.compares:
            return now
        # The schedule that comes first holds least.
        first = {(c.shape, c.recompute): (size, c) for size, c in self._too_big[::-1]}
        for size, core in sorted(first.values(), key=lambda pair: pair[0])[:TIGHTEST]:
            if now.tightest is not None and size >= now.tightest.priced.memory.total:
                return now
            now, opened = self._play(core, now)
            for played in (item for _, item in opened if isinstance(item, Played)):
                now = yield from offers(now, [played.trials.tightest(played.plain)])
        return now

    def _relieve(self, shapes: Sequence[Shape], now: Standings) -> Steps:
        """Where memory binds the best plan: the same shape with ranks that recompute as much as
        each must and split as much of their state, under every usual schedule."""
        pins = self.question.pins
        if now.best is None or now.best.decided.pp == 1 or pins.recompute:
            return now
        best, layout = now.best.decided, now.best.decided.layout
        roomy = not layout.recompute.runs_again and layout.zero < 2
        if roomy and now.best.priced.memory.filled < FILLED:
            return now
        if pins.schedule not in (None, *SCHEDULES):
            return now
        own = self._shape(best.pp, best.candidate)
        shapes = [replace(own, lean=lean) for lean in LEAN]
        for shape, name in product(
            [shape for shape in shapes if self._models.of(shape) is not None],
            USUAL if pins.schedule is None else (pins.schedule,),
        ):
            kind, depth = SCHEDULES[name], pins.interleave or 1
            if kind.even_ranks:  # a part of the model is on two ranks there
                continue
            if kind.interleaves and kind.stages == 1:
                depth = len(best.stages) // best.pp if name == best.schedule else DEPTHS[0]
            now = yield from self._try(Core(shape, name, depth, None), now)
        return now

    def _dive(self, shapes: Sequence[Shape], now: Standings) -> Steps:
        """Where memory is short, a plan to compare with: fewest samples, full recomputation."""
        if now.best is None and now.compares:
            return now
        layout = None if now.best is None else now.best.decided.layout
        if layout is not None and not layout.recompute.runs_again and layout.zero < 3:
            return now
        first, inner = (USUAL[0], self.question.pins.schedule), self.question.cluster.levels[0].span
        for pp in dict.fromkeys(shape.pp for shape in shapes):
            if pp > self._models.most_units:
                continue
            some = [s for s in shapes if s.pp == pp and s.candidate.model.device_count <= inner]
            some.sort(key=lambda s: (-s.candidate.model.device_count, s.samples))
            for shape in some[:1]:
                model = self._models.of(shape) if self._promises(shape, now.best_s) else None
                if model is None:
                    continue
                for core in cores_of(self.question, shape):
                    least = core.recompute == Recompute(FULL) and core.name in first
                    if least and self._least_s(core, model) < now.best_s:
                        now = yield from self._try(core, now)
        return now

    def _least_s(self, core: Core, model: Model) -> float:
        """No plan of a core that fits takes less."""
        _, work_s = self._bounds.fitting(core, model, [*self._bounds.shares(core, model)])
        return max(work_s, self._bounds.core_s(core, model))

    def _shapes(self, pp: int) -> list[Shape]:
        """Raises `LayoutError`."""
        question = self.question
        devices = question.cluster.device_count // pp
        beside = (question.pins.cp or 1) * (question.pins.tp2 or 1)
        if devices % beside or not any(
            allows(question.pins, split) for split in splits(devices // beside)
        ):
            return []
        sharing = self.sharing.within(devices)
        listed = question.legal(candidates(devices, question.batch, question.pins, sharing))
        return [self._shape(pp, candidate) for candidate in listed]

    def _shape(self, pp: int, candidate: Candidate) -> Shape:
        samples = self.question.batch // (candidate.parts * candidate.microbatches)
        return Shape(pp, candidate, samples)

    def _open(self, shape: Shape, now: Standings) -> tuple[Standings, list[Opened]]:
        """The cores of a shape that may win, with their bounds; last, itself as a leaner one."""
        now, opened = replace(now, tried=now.tried + 1), list[Opened]()
        if shape.pp > self._models.most_units:
            return refuse(now, too_many(shape.pp, self._models.most_units)), opened
        if not self._promises(shape, now.best_s):
            return now, opened
        model, lean_s = self._models.of(shape), float("inf")
        if model is None:
            return now, opened
        shares: dict[Recompute | None, list[Share]] = {}
        for core in cores_of(self.question, shape):
            bound_s = self._bounds.core_s(core, model)
            if bound_s >= now.best_s:
                continue
            try:
                check_core(self.question, core, len(model.cuts.units))
            except ScheduleError as error:
                now = refuse(now, error)
                continue
            if core.recompute not in shares:
                shares[core.recompute] = [*self._bounds.shares(core, model)]
            needed, work_s = self._bounds.fitting(core, model, shares[core.recompute])
            if work_s < float("inf"):
                opened.append((max(bound_s, work_s), core))
            else:
                self._too_big.append((needed, core))
            crowded = self._bounds.short(core, shares[core.recompute])
            if shape.lean == FASTEST and (crowded or work_s > SLOWED * bound_s):
                lean_s = min(lean_s, self._bounds.leaner_s(core, model, now.compares))
        if lean_s < now.best_s:
            self._crowded.add(shape)
            opened += self._leaner(shape, lean_s)
        return now, opened

    def _leaner(self, shape: Shape, bound_s: float) -> list[Opened]:
        """A shape whose ranks are short of memory, sharded so that they hold less; once."""
        if shape.lean != FASTEST or shape not in self._crowded or shape in self._leaned:
            return []
        self._leaned.add(shape)
        return [(bound_s, replace(shape, lean=lean)) for lean in LEAN if lean != FASTEST]

    def _promises(self, shape: Shape, best_s: float) -> bool:
        """Whether a core of a shape is expected to take less, by what is most like it; so it is
        where nothing is, the shape is solved, or nothing is to beat."""
        known = self._models.like(shape)
        if known is None or best_s == float("inf"):
            return True
        units = len(known[0].cuts.units)
        return self._bounds.may_beat(best_s, possible_cores(self.question, shape, units), *known)

    def _try(self, core: Core, now: Standings) -> Steps:
        """A core alone, played and offered."""
        now, opened = self._play(core, now)
        yield now
        for played in (item for _, item in opened if isinstance(item, Played)):
            now = yield from self._offer(played, now)
        return now

    def _offer(self, item: Played, now: Standings) -> Steps:
        """The answers of a core that may win."""
        plain, core = item.plain, item.trials.core
        least_s = self._bounds.update_s(core.shape, item.trials.model)
        if plain.step_s * (1 - RELIEF) + least_s < now.best_s:
            plain = item.trials.relieved(plain)
        if plain.step_s + least_s < now.best_s:
            fastest_s = float("inf")
            for answer in item.trials.answers(plain):
                if answer.priced.memory.fits:
                    fastest_s = min(fastest_s, answer.priced.time.total_s)
                now = offer(now, answer)
                yield now
            if fastest_s > SLOWED * (plain.step_s + least_s):
                self._crowded.add(core.shape)
        return now

    def _play(self, core: Core, now: Standings) -> tuple[Standings, list[Opened]]:
        """The core without data traffic, and the next deeper one where that may be faster."""
        shape, model = core.shape, self._models.of(core.shape)
        assert model is not None
        opened: list[Opened] = []
        try:
            check_core(self.question, core, len(model.cuts.units))
            order = self._orders.of(core, model)
        except ScheduleError as error:
            return refuse(now, error), opened
        pins = self.question.pins
        listed = [whole.layout for whole in self._bounds.roomy(core, model)]
        if core.recompute is None:  # which goes on to higher levels of ZeRO by itself
            least = {(one.dp_shard, one.offload): one for one in reversed(listed)}
            listed = [one for one in listed if least[one.dp_shard, one.offload] is one]
        if not listed:
            return now, opened
        made = CoreTrials(self.question, core, model, order, listed)
        plain = made.plain()
        least_s = self._bounds.update_s(shape, model)
        self._steps[core] = plain.step_s
        if plain.step_s * (1 - RELIEF) + least_s < now.best_s:
            opened.append((plain.step_s * (1 - RELIEF) + least_s, Played(made, plain)))
        if pins.interleave is None and core.depth in DEPTHS[:-1] and not order.written:
            place = DEPTHS.index(core.depth)
            above = [self._steps.get(replace(core, depth=depth)) for depth in DEPTHS[:place]]
            shortest_s = min((s for s in above if s is not None), default=float("inf"))
            if plain.step_s * (1 - RELIEF) < shortest_s:
                deeper = replace(core, depth=DEPTHS[place + 1])
                opened.append((self._bounds.core_s(deeper, model), deeper))
        return now, opened


def _shape(item: Item) -> Shape:
    if isinstance(item, Shape):
        return item
    return (item if isinstance(item, Core) else item.trials.core).shape
