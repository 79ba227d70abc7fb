"""The search over plans of several stages, best first.

Shardings are solved apart (`staged.pipeline_models`). What is left is searched by lower bounds
(`staged.lower_bounds`): a *shape* (pipeline ranks, tensor-parallel degree, samples) opens into
*cores* (schedule, stages a rank, recomputation); a core is played in its order of actions
(`staged.orders`) without data traffic, and its step is the next bound; then with the layouts of
state (`staged.cores`). The search ends where no bound is below the best plan.

What is not looked at: deeper schedules of several stages a rank once they take `RELIEF` longer;
again, cuts that take so much more than the best plan; cores whose ranks would need
`lower_bounds.SPARE` times their memory if all had as much of the model.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product

from autopar.lowering.stages import stage_parts
from autopar.nouns.layout import LayoutError
from autopar.nouns.recompute import FULL, KEEP_ALL, Recompute
from autopar.pipeline.actions import ScheduleError
from autopar.pipeline.schedules.table import SCHEDULES, kind_of
from autopar.planner.ask.candidates import NOTHING_SHARED, Sharing, StateLayout, candidates
from autopar.planner.ask.pins import allows, splits
from autopar.planner.ask.question import Answer, Question
from autopar.planner.problem.solving import Solver
from autopar.planner.solve.solved import Solved, lowered_of, state_of
from autopar.planner.solve.standings import Standings
from autopar.planner.staged.cores import CoreTrials, piped
from autopar.planner.staged.found import FOUND, NAMED, VEE, limits
from autopar.planner.staged.lower_bounds import LowerBounds
from autopar.planner.staged.orders import Orders
from autopar.planner.staged.pipeline_models import Models
from autopar.planner.staged.shapes import EVERY, Core, Shape
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Cuts
from autopar.pricing.pipeline import PipelinePrices
from autopar.pricing.planned import choices_of
from autopar.pricing.prices import Prices
from autopar.pricing.repricing import objective
from autopar.pricing.sends import Order
from autopar.pricing.state_prices import StatePrices
from autopar.pricing.summary import summarise
from autopar.pricing.trials import Trial

USUAL = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
"""Schedules that are tried where none is pinned: by depth of memory and of bubble."""
DEPTHS = (2, 3, 4, 8, 16)
"""Stages a rank that are tried, one after the other, where a schedule may have several."""
TIGHTEST = 12
"""Pipelines that are priced in full where nothing fits."""
FILLED = 0.9
"""Of its memory, what a plan must take for it to bind."""
RELIEF = 0.1
"""What moving units between stages is taken to gain at most."""


@dataclass(frozen=True, slots=True)
class Played:
    """A core with its best cut without data traffic."""

    trials: CoreTrials
    plain: Trial


Item = Shape | Core | Played


@dataclass(slots=True)
class Pipelines:
    """The search. ``sharing``: what ranks may share where that is not pinned. ``tried``: shapes
    that were opened; ``bound_s``: of all pipelines; ``refused``: why one could not be."""

    question: Question
    solver: Solver
    standings: Standings
    sharing: Sharing = NOTHING_SHARED
    tried: int = 0
    bound_s: float = float("inf")
    refused: str = ""
    _models: Models = field(init=False)
    _bounds: LowerBounds = field(init=False)
    _orders: Orders = field(init=False)
    _order_of_best: Order | None = None
    _shape_of_best: Shape | None = None
    _too_big: list[tuple[float, Core]] = field(default_factory=list)
    _steps: dict[Core, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._models = Models(self.question, self.solver)
        self._bounds = LowerBounds(self.question, self._models)
        self._orders = Orders(self.question)

    def search(self, degrees: Sequence[int], known: Sequence[Solved]) -> None:
        """Offers the standings what may win. ``known``: solved candidates of one stage."""
        shapes = [*self._shapes(degrees)]
        if not shapes:
            return
        for solved in known:
            if not solved.repeats:
                self._models.add(solved)
        self._models.solve_alone(max(shape.samples for shape in shapes))
        self._dive(shapes)
        self._best_first(shapes)
        if self.standings.best is None:
            self._squeeze()
        self._relieve()

    def _best_first(self, shapes: Sequence[Shape]) -> None:
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
            self.bound_s = min(self.bound_s, bound_s)
            if self.standings.beats(bound_s):
                shape = _shape(item)
                self.standings.beaten_by_bound(shape.candidate, bound_s, shape.pp)
                return
            self.solver.check()
            for next_s, opened in self._open(item):
                heapq.heappush(heap, (max(bound_s, next_s), next(turn), opened))

    def _squeeze(self) -> None:
        """Where nothing fits: prices the pipelines that may need least."""
        # The schedule that comes first holds least.
        first = {(core.shape, core.recompute): (size, core) for size, core in self._too_big[::-1]}
        for needed, core in sorted(first.values(), key=lambda pair: pair[0])[:TIGHTEST]:
            tightest = self.standings.tightest
            if tightest is not None and needed >= tightest.memory.total:
                return
            for _, played in self._play(core):
                if isinstance(played, Played):
                    self._offer_answer(played, played.trials.tightest(played.plain))

    def _relieve(self) -> None:
        """Where memory binds the best plan: the same shape with ranks that recompute as much as
        each must and split as much of their state, under every usual schedule."""
        best, pins = self.standings.best, self.question.pins
        if best is None or best.pp == 1 or pins.recompute:
            return
        roomy = not best.layout.recompute.runs_again and best.layout.zero < 2
        if roomy and best.memory.filled < FILLED:
            return
        if pins.schedule not in (None, *SCHEDULES):
            return
        assert self._shape_of_best is not None
        shapes = [replace(self._shape_of_best, lean=lean) for lean in (False, True)]
        for shape, name in product(
            [shape for shape in shapes if self._models.of(shape) is not None],
            USUAL if pins.schedule is None else (pins.schedule,),
        ):
            kind, depth = SCHEDULES[name], pins.interleave or 1
            if kind.even_ranks:  # a part of the model is on two ranks there
                continue
            if kind.interleaves and kind.stages == 1:
                depth = len(best.stages) // best.pp if name == best.schedule else DEPTHS[0]
            for _, item in self._play(Core(shape, name, depth, None)):
                if isinstance(item, Played):
                    self._offer(item)

    def _dive(self, shapes: Sequence[Shape]) -> None:
        """Where memory is short, a plan to compare with: fewest samples, full recomputation."""
        best = self.standings.best
        if best is not None and not best.layout.recompute.runs_again and best.layout.zero < 3:
            return
        pins, inner = self.question.pins, self.question.cluster.levels[0].span
        for pp in dict.fromkeys(shape.pp for shape in shapes):
            if pp > self._models.most_units:
                continue
            some = [s for s in shapes if s.pp == pp and s.candidate.model.device_count <= inner]
            shape = min(
                some, key=lambda s: (-s.candidate.model.device_count, s.samples), default=None
            )
            model = None if shape is None else self._models.of(shape)
            if shape is None or model is None:
                continue
            for core in self._cores(shape):
                least = core.recompute == Recompute(FULL) and core.name in (
                    USUAL[0],
                    pins.schedule,
                )
                if least and self._bounds.fitting(core, model)[1] < self._best_s:
                    for _, item in self._play(core):
                        if isinstance(item, Played):
                            self._offer(item)

    def settled(self, best: Answer) -> Answer:
        """The same decisions, lowered on the winner's own mesh and priced there.

        Raises `CutError` where the model cannot be cut so after all.
        """
        question, candidate, layout = self.question, best.candidate, best.layout
        lowered = lowered_of(question, best.spread, candidate)
        prices = Prices(question.cluster, lowered.mesh, question.precision, question.fusion)
        summary = summarise(lowered, prices, question.framework)
        cuts = CutModel(Cuts.of(lowered), summary, prices, question.framework)
        state = state_of(question, layout, candidate)
        order = self._order_of_best
        assert order is not None
        stages = PipelinePrices(cuts, question.cluster, state, layout.recompute, best.pp)
        stages = stages.staged(order.schedule, choices_of(best.stages, order.schedule))
        places = {name: i for i, name in enumerate(cuts.units)}
        ends = (*(places[stage.first] for stage in best.stages[1:]), len(cuts.units))
        hidden = StateLayout(1, candidate.data, 1 if candidate.data > 1 else 0, KEEP_ALL)
        held = StatePrices(question.cluster, state_of(question, hidden, candidate), 0.0)
        additive = objective(lowered, prices, held)
        answer = piped(question, best, stages, order, ends)
        stage_parts(lowered, answer.stages)
        return replace(answer, lowered=lowered, objective=additive)

    def _shapes(self, degrees: Sequence[int]) -> Iterator[Shape]:
        question = self.question
        for pp in degrees:
            devices = question.cluster.device_count // pp
            beside = (question.pins.cp or 1) * (question.pins.tp2 or 1)
            if devices % beside or not any(
                allows(question.pins, split) for split in splits(devices // beside)
            ):
                continue
            try:
                sharing = self.sharing.within(devices)
                listed = question.legal(candidates(devices, question.batch, question.pins, sharing))
            except LayoutError as error:
                self.refused = self.refused or str(error)
                continue
            for candidate in listed:
                samples = question.batch // (candidate.parts * candidate.microbatches)
                yield Shape(pp, candidate, samples)

    def _open(self, item: Item) -> Iterator[tuple[float, Item]]:
        """What an item comes to next, with its bound; a played core offers its answers."""
        if isinstance(item, Shape):
            self.tried += 1
            most = self._models.most_units
            if item.pp > most:
                self.refused = self.refused or (
                    f"{item.pp} stages of {most} units that the model can be cut between: take at "
                    f"most {most} stages"
                )
                return
            model, lean_s = self._models.of(item), float("inf")
            if model is not None:
                for core in self._cores(item):
                    bound_s = self._bounds.core_s(core, model)
                    if bound_s >= self._best_s:
                        continue
                    needed, work_s = self._bounds.fitting(core, model)
                    if work_s < float("inf"):
                        yield max(bound_s, work_s), core
                    else:
                        self._too_big.append((needed, core))
                    if not item.lean and self._bounds.short(core, model):
                        lean_s = min(lean_s, bound_s)
                if lean_s < float("inf"):
                    yield lean_s, replace(item, lean=True)
        elif isinstance(item, Core):
            yield from self._play(item)
        else:
            self._offer(item)

    def _offer(self, item: Played) -> None:
        plain, core = item.plain, item.trials.core
        least_s = self._bounds.update_s(core.shape, item.trials.model)
        if plain.step_s * (1 - RELIEF) + least_s < self._best_s:
            plain = item.trials.relieved(plain)
        if plain.step_s + least_s < self._best_s:
            for answer in item.trials.answers(plain):
                self._offer_answer(item, answer)

    def _offer_answer(self, item: Played, answer: Answer) -> None:
        self.standings.offer(answer)
        if self.standings.best is answer:
            self._order_of_best = item.trials.order
            self._shape_of_best = item.trials.core.shape

    @property
    def _best_s(self) -> float:
        best = self.standings.best
        return float("inf") if best is None else best.time.total_s

    # Cores: schedules and recomputation.

    def _cores(self, shape: Shape) -> Iterator[Core]:
        pins = self.question.pins
        for recompute in EVERY if pins.recompute is None else (pins.recompute,):
            for name in USUAL if pins.schedule is None else (pins.schedule,):
                if name == "zb-h1" and recompute.runs_again and pins.schedule is None:
                    continue  # backward is whole there, and so this is 1f1b
                if name == FOUND and self.question.actions is None:
                    depths = (pins.interleave,) if pins.interleave else (1, VEE)
                    yield from (Core(shape, named, 1, recompute) for named in NAMED)
                    for depth in depths:
                        for limit in limits(shape.pp, shape.candidate.microbatches):
                            yield Core(shape, name, depth, recompute, limit)
                    continue
                kind = SCHEDULES.get(name)
                several = kind is not None and kind.interleaves and kind.stages == 1
                depth = pins.interleave or (DEPTHS[0] if several else 1)
                yield Core(shape, name, depth, recompute)

    def _play(self, core: Core) -> Iterator[tuple[float, Item]]:
        """The core without data traffic, and the next deeper one where that may be faster."""
        shape, model = core.shape, self._models.of(core.shape)
        assert model is not None
        units, stages = len(model.cuts.units), shape.pp * core.depth
        if core.name in SCHEDULES:
            try:
                kind = kind_of(core.name, shape.pp, shape.candidate.microbatches, core.depth)
            except ScheduleError as error:
                self.refused = self.refused or str(error)
                return
            stages *= kind.stages
        if stages > units and self.question.actions is None:
            self.refused = self.refused or (
                f"{stages} stages of {units} units that the model can be cut between: take at most "
                f"{units} stages"
            )
            return
        try:
            order = self._orders.of(core, model)
        except ScheduleError as error:
            self.refused = self.refused or str(error)
            return
        pins = self.question.pins
        listed = [whole.layout for whole, _ in self._bounds.shares(core, model)]
        if core.recompute is None:  # which goes on to higher levels of ZeRO by itself
            least = {(one.dp_shard, one.offload): one for one in reversed(listed)}
            listed = [one for one in listed if least[one.dp_shard, one.offload] is one]
        if not listed:
            return
        made = CoreTrials(self.question, core, model, order, listed)
        plain = made.plain()
        least_s = self._bounds.update_s(shape, model)
        self._steps[core] = plain.step_s
        if plain.step_s * (1 - RELIEF) + least_s < self._best_s:
            yield plain.step_s * (1 - RELIEF) + least_s, Played(made, plain)
        if pins.interleave is None and core.depth in DEPTHS[:-1] and not order.written:
            place = DEPTHS.index(core.depth)
            above = [self._steps.get(replace(core, depth=depth)) for depth in DEPTHS[:place]]
            shortest_s = min((s for s in above if s is not None), default=float("inf"))
            if plain.step_s * (1 - RELIEF) < shortest_s:
                deeper = replace(core, depth=DEPTHS[place + 1])
                yield self._bounds.core_s(deeper, model), deeper


def _shape(item: Item) -> Shape:
    if isinstance(item, Shape):
        return item
    return (item if isinstance(item, Core) else item.trials.core).shape
