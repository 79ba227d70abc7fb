"""The search over plans of several stages, best first.

The sharding of all ops depends on the tensor-parallel degree and on how many samples a microbatch
has on one data rank, not on stages, cuts or schedule; it is solved once for each such pair. What is
left is searched by lower bounds: a *shape* (pipeline ranks, tensor-parallel degree, samples) opens
into *cores* (schedule, stages a rank, recomputation); a core is played without data traffic, and
its step is the next bound; then with the layouts of state (`autopar.planner.cores`). The search
ends where no bound is below the best plan.

What bounds assume of the cost model: a device is no faster with a part of an op than with all of
it, per sample no faster with fewer samples, and takes no less for more; where devices differ, a
kind gains no more over the slowest than it does where one device has all of the model. What is not
looked at: deeper schedules of several stages a rank once they take `RELIEF` longer; again, cuts
that take so much more than the best plan; cores whose ranks would need `SPARE` times their memory
if all had as much of the model.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from autopar.lowering.stages import stage_parts
from autopar.nouns.plan import RECOMPUTE
from autopar.pipeline.actions import Lists, ScheduleError
from autopar.pipeline.schedules.table import SCHEDULES, kind_of, schedule
from autopar.pipeline.written import written
from autopar.planner.candidates import Candidate, Layout, candidates, layouts, offloaded
from autopar.planner.cores import BY_RANK, Core, CoreTrials, Model, Pace, Shape, Whole, piped
from autopar.planner.fixed import FixError, splits
from autopar.planner.found import FOUND, NAMED, VEE, found_order, limits
from autopar.planner.pricing.memory import overhead, stage_bytes
from autopar.planner.pricing.offload import streamed_slope
from autopar.planner.pricing.pipeline import CutModel, PipelinePrices, choices_of
from autopar.planner.pricing.prices import Prices
from autopar.planner.pricing.repricing import objective
from autopar.planner.pricing.sends import Order, Sends
from autopar.planner.pricing.simulation import stage_time
from autopar.planner.pricing.state import StateSharding
from autopar.planner.pricing.state_prices import StatePrices
from autopar.planner.pricing.summary import summarise
from autopar.planner.pricing.trials import Trial
from autopar.planner.problem.solving import Solver
from autopar.planner.question import Answer, Question
from autopar.planner.solved import Solved, lowered_of, solve, state_of
from autopar.planner.standings import Standings

USUAL = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
"""Schedules that are tried where none is pinned: by depth of memory and of bubble."""
DEPTHS = (2, 3, 4, 8, 16)
"""Stages a rank that are tried, one after the other, where a schedule may have several."""
KEPT = 24
"""Schedules that are kept with their clocks."""
SPARE = 1.05
"""Of its memory, what a rank may need in a cut into equal parts for the core to be tried."""
TIGHTEST = 12
"""Pipelines that are priced in full where nothing fits."""
NEAR = 0.8
"""Of its memory, what a rank must need in a cut into equal parts for state to be offloaded."""
FILLED = 0.9
"""Of its memory, what a plan must take for it to bind."""
RELIEF = 0.1
"""What moving units between stages is taken to gain at most."""
WAITED = 0.6
"""Share of a microbatch's time that no schedule can put off (forward, and gradients of inputs),
at least, of a model that is not solved yet."""


@dataclass(frozen=True, slots=True)
class Played:
    """A core with its best cut without data traffic."""

    trials: CoreTrials
    plain: Trial


Item = Shape | Core | Played


@dataclass(slots=True)
class Pipelines:
    """The search. ``tried``: shapes that were opened; ``bound_s``: of all pipelines; ``refused``:
    why one could not be."""

    question: Question
    solver: Solver
    standings: Standings
    tried: int = 0
    bound_s: float = float("inf")
    refused: str = ""
    sample_s: float = 0.0
    """Of forward and backward, at least, on one tensor-parallel rank of the slowest kind."""
    _alone: Model | None = None
    _models: dict[tuple[int, int], Model | None] = field(default_factory=dict)
    _orders: dict[tuple[object, ...], Order | None] = field(default_factory=dict)
    _order_of_best: Order | None = None
    _too_big: list[tuple[float, Core]] = field(default_factory=list)
    _steps: dict[Core, float] = field(default_factory=dict)

    def search(self, degrees: Sequence[int], known: Sequence[Solved]) -> None:
        """Offers the standings what may win. ``known``: solved candidates of one stage."""
        shapes = [*self._shapes(degrees)]
        if not shapes:
            return
        for solved in known:
            if not solved.repeats:
                self._know(solved)
        self._solve_alone(max(shape.samples for shape in shapes))
        self._dive(shapes)
        self._best_first(shapes)
        if self.standings.best is None:
            self._squeeze()
        self._relieve()

    def _best_first(self, shapes: Sequence[Shape]) -> None:
        turn = count()
        heap: list[tuple[float, int, Item]] = [
            (self._shape_bound(shape), next(turn), shape) for shape in shapes
        ]
        heapq.heapify(heap)
        while heap:
            bound_s, _, item = heapq.heappop(heap)
            if isinstance(item, Shape):
                again_s = self._shape_bound(item)
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
                    self.standings.offer(played.trials.tightest(played.plain))

    def _relieve(self) -> None:
        """Where memory binds the best plan: the same shape with ranks that recompute as much as
        each must and split as much of their state, under every usual schedule."""
        best, fixed = self.standings.best, self.question.fixed
        if best is None or best.pp == 1 or fixed.recompute:
            return
        roomy = best.layout.recompute == "none" and best.layout.zero < 2
        if roomy and best.memory.filled < FILLED:
            return
        if fixed.schedule not in (None, *SCHEDULES):
            return
        samples = self.question.batch // (best.candidate.data * best.candidate.microbatches)
        shape = Shape(best.pp, best.candidate, samples)
        for name in USUAL if fixed.schedule is None else (fixed.schedule,):
            kind, depth = SCHEDULES[name], fixed.interleave or 1
            if kind.even_ranks:  # a part of the model is on two ranks there
                continue
            if kind.interleaves and kind.stages == 1:
                depth = len(best.stages) // best.pp if name == best.schedule else DEPTHS[0]
            for _, item in self._play(Core(shape, name, depth, BY_RANK)):
                if isinstance(item, Played):
                    self._offer(item)

    def _dive(self, shapes: Sequence[Shape]) -> None:
        """Where memory is short, a plan to compare with: fewest samples, full recomputation."""
        best = self.standings.best
        if best is not None and best.layout.recompute == "none" and best.layout.zero < 3:
            return
        fixed, inner = self.question.fixed, self.question.cluster.levels[0].span
        for pp in dict.fromkeys(shape.pp for shape in shapes):
            some = [s for s in shapes if s.pp == pp <= self._most_units and s.candidate.tp <= inner]
            shape = min(some, key=lambda s: (-s.candidate.tp, s.samples), default=None)
            model = None if shape is None else self._model(shape)
            if shape is None or model is None:
                continue
            for core in self._cores(shape, model):
                least = core.recompute == RECOMPUTE[-1] and core.name in (USUAL[0], fixed.schedule)
                if least and self._fitting(core, model)[1] < self._best_s:
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
        cuts = CutModel(lowered, summary, prices, question.framework)
        state = state_of(question, layout, candidate)
        order = self._order_of_best
        assert order is not None
        stages = PipelinePrices(cuts, question.cluster, state, layout.recompute, best.pp)
        stages = stages.staged(order.schedule, choices_of(best.stages, order.schedule))
        places = {name: i for i, name in enumerate(cuts.units)}
        ends = (*(places[stage.first] for stage in best.stages[1:]), len(cuts.units))
        hidden = Layout(1, candidate.data, 1 if candidate.data > 1 else 0, "none")
        held = StatePrices(question.cluster, state_of(question, hidden, candidate), 0.0)
        additive = objective(lowered, prices, held)
        answer = piped(question, best, stages, order, ends)
        stage_parts(lowered, answer.stages)
        return replace(answer, lowered=lowered, objective=additive)

    def _shapes(self, degrees: Sequence[int]) -> Iterator[Shape]:
        question = self.question
        for pp in degrees:
            devices = question.cluster.device_count // pp
            if not any(question.fixed.allows(split) for split in splits(devices)):
                continue
            try:
                listed = candidates(devices, question.batch, question.fixed)
            except FixError as error:
                self.refused = self.refused or str(error)
                continue
            for candidate in listed:
                samples = question.batch // (candidate.data * candidate.microbatches)
                yield Shape(pp, candidate, samples)

    def _open(self, item: Item) -> Iterator[tuple[float, Item]]:
        """What an item comes to next, with its bound; a played core offers its answers."""
        if isinstance(item, Shape):
            self.tried += 1
            if item.pp > self._most_units:
                self.refused = self.refused or (
                    f"{item.pp} stages of {self._most_units} units that the model can be cut "
                    f"between: take at most {self._most_units} stages"
                )
                return
            model = self._model(item)
            if model is not None:
                for core in self._cores(item, model):
                    bound_s = self._core_bound(core, model)
                    if bound_s >= self._best_s:
                        continue
                    needed, work_s = self._fitting(core, model)
                    if work_s < float("inf"):
                        yield max(bound_s, work_s), core
                    else:
                        self._too_big.append((needed, core))
        elif isinstance(item, Core):
            yield from self._play(item)
        else:
            self._offer(item)

    def _offer(self, item: Played) -> None:
        plain, core = item.plain, item.trials.core
        least_s = self._update_bound(core.shape, item.trials.model)
        if plain.step_s * (1 - RELIEF) + least_s < self._best_s:
            plain = item.trials.relieved(plain)
        if plain.step_s + least_s < self._best_s:
            for answer in item.trials.answers(plain):
                self.standings.offer(answer)
                if self.standings.best is answer:
                    self._order_of_best = item.trials.order

    @property
    def _most_units(self) -> float:
        """Between which any sharding of the model can be cut."""
        known = [len(model.cuts.units) for model in self._models.values() if model is not None]
        return max(known, default=float("inf"))

    def _fitting(self, core: Core, model: Model) -> tuple[float, float]:
        """Bytes of the first rank where every rank has as much of the model, in the layout of state
        that needs least; and seconds of the mean rank's work in the fastest layout that fits then.

        No schedule holds fewer microbatches on the first rank than there are ranks.
        """
        question, shape = self.question, core.shape
        m, pp = shape.candidate.microbatches, shape.pp
        views = shape.views(question.cluster)
        shares = [*self._shares(core, model)]
        needed = min((size for _, size in shares), default=float("inf"))
        room = SPARE * self._room(shape)
        fitting = [whole for whole, size in shares if size <= room]
        if not fitting:
            return needed, float("inf")
        pass_s = model.least_pass_s(fitting, core.recompute, question.cluster)
        late_s = min(whole.streamed_s for whole in fitting) / pp
        return needed, m * pass_s / model.pace(views, core.levels[0]).ranks + late_s

    def _room(self, shape: Shape) -> float:
        """Memory of a rank, in the mean."""
        views = shape.views(self.question.cluster)
        return sum(view.device.memory_bytes for view in views) / shape.pp

    def _shares(self, core: Core, model: Model) -> Iterator[tuple[Whole, float]]:
        """All of the model under each layout of state, with bytes of the first rank where every
        rank has as much of it. Behind a layout that comes near to what a rank has stands the same
        with the optimizer's state offloaded."""
        question, shape = self.question, core.shape
        m, pp, recompute = shape.candidate.microbatches, shape.pp, core.levels[0]
        life = model.solved.summary.lives[recompute]
        share, process = overhead(model.solved.summary.packages, question.cluster.device)
        saved = min(m, pp) * life.saved / pp + life.peak - life.saved
        for layout in layouts(shape.candidate.data, question.fixed):
            if layout.recompute != recompute:
                continue
            for one in (layout, offloaded(layout)) if question.offloads else (layout,):
                whole = self._whole(one, shape.candidate, model)
                needed = (1 + share) * (whole.state_bytes / pp + saved) + process
                yield whole, needed
                if needed <= NEAR * self._room(shape):
                    break

    def _whole(self, layout: Layout, candidate: Candidate, model: Model) -> Whole:
        if layout not in model.layouts:
            state = state_of(self.question, layout, candidate)
            held = stage_bytes(model.solved.summary, state, layout.recompute)
            size = held.parameters + held.gradients + held.optimizer
            devices = [group.device for group in self.question.cluster.groups]
            late_s = held.host and held.host * min(map(streamed_slope, devices))
            model.layouts[layout] = Whole(layout, state, size, late_s)
        return model.layouts[layout]

    @property
    def _best_s(self) -> float:
        best = self.standings.best
        return float("inf") if best is None else best.time.total_s

    # Bounds: no plan of a shape or core is faster.

    def _shape_bound(self, shape: Shape) -> float:
        tp, m = shape.candidate.tp, shape.candidate.microbatches
        model, views = self._models.get((tp, shape.samples)), shape.views(self.question.cluster)
        if model is not None:
            pace = model.pace(views, "none")
            waited_s = model.pass_s - model.whole["none"].weights_s
            least_s = max(m * model.pass_s / pace.ranks, waited_s / pace.fastest)
            return least_s + self._update_bound(shape, model)
        pass_s = self.sample_s * shape.samples / tp
        for (their_tp, samples), other in self._models.items():
            if their_tp == tp and other is not None:
                # More samples take no less, fewer of them no less each.
                pass_s = max(pass_s, other.pass_s * min(1.0, shape.samples / samples))
        pace = Pace(shape.pp, 1.0) if self._alone is None else self._alone.pace(views, "none")
        return pass_s * max(m / pace.ranks, WAITED / pace.fastest)

    def _update_bound(self, shape: Shape, model: Model) -> float:
        """The optimizer where all ranks share it; nothing where devices differ."""
        if len(self.question.cluster.kinds) > 1:
            return 0.0
        return model.whole["none"].update_s / (shape.pp * shape.candidate.data)

    def _core_bound(self, core: Core, model: Model) -> float:
        """The most of: the work of the mean rank; what a microbatch waits for; and where each rank
        has one stage, what it waits for before its first action and, where backward is whole, after
        its last, for the cut that is best for that."""
        whole, views = model.whole[core.levels[0]], core.shape.views(self.question.cluster)
        pace = model.pace(views, core.levels[0])
        m, p = core.shape.candidate.microbatches, core.shape.pp
        pass_s = whole.forward_s + whole.backward_s
        kind = SCHEDULES.get(core.name)
        splits_backward = (kind is None or kind.splits) and core.levels[0] == "none"
        waited_s = pass_s - (whole.weights_s if splits_backward else 0.0)
        least_s = max(m * pass_s / pace.ranks, waited_s / pace.fastest)
        simple = kind is not None and kind.stages == core.depth == 1 and not kind.even_ranks
        if simple and pace == Pace(p, 1.0):
            # With x[r] the share of a pass before rank r: m (x[r+1] - x[r]) + waits x[r] <= step.
            waits = whole.forward_s / pass_s if splits_backward else 1.0
            least_s = max(least_s, pass_s * waits / (1 - (1 - waits / m) ** p))
        return least_s + self._update_bound(core.shape, model)

    # Models: solved shardings.

    def _model(self, shape: Shape) -> Model | None:
        key = shape.candidate.tp, shape.samples
        if key not in self._models:
            self._models[key] = None
            solved = solve(self.question, shape.candidate, self.solver)
            if solved is not None and not solved.repeats:
                self._know(solved)
        return self._models[key]

    def _know(self, solved: Solved) -> None:
        question, candidate = self.question, solved.candidate
        samples = question.batch // (candidate.data * candidate.microbatches)
        prices = Prices(question.cluster, solved.lowered.mesh, question.precision, question.fusion)
        mesh = Layout(1, 1, 0, "none").mesh(candidate.tp)
        alone = StateSharding(0, mesh, 1, question.precision, question.optimizer)
        cuts = CutModel(solved.lowered, solved.summary, prices, question.framework)
        whole, stages = {}, {}
        for recompute in RECOMPUTE:
            whole[recompute] = stage_time(solved.summary, alone, question.cluster, recompute)
            stages[recompute] = PipelinePrices(cuts, question.cluster, alone, recompute, 1)
        self._models[candidate.tp, samples] = Model(solved, cuts, whole, stages)

    def _solve_alone(self, samples: int) -> None:
        """What a sample takes at least: as much as where one device computes so many at once."""
        alone = Candidate(1, 1, self.question.batch // samples)
        model = self._model(Shape(1, alone, samples))
        if model is not None:
            self.sample_s = model.pass_s / samples
            self._alone = model

    # Cores: schedules and recomputation.

    def _cores(self, shape: Shape, model: Model) -> Iterator[Core]:
        fixed = self.question.fixed
        for recompute in RECOMPUTE if fixed.recompute is None else (fixed.recompute,):
            for name in USUAL if fixed.schedule is None else (fixed.schedule,):
                if name == "zb-h1" and recompute != "none" and fixed.schedule is None:
                    continue  # backward is whole there, and so this is 1f1b
                if name == FOUND and fixed.actions is None:
                    depths = (fixed.interleave,) if fixed.interleave else (1, VEE)
                    yield from (Core(shape, named, 1, recompute) for named in NAMED)
                    for depth in depths:
                        for limit in limits(shape.pp, shape.candidate.microbatches):
                            yield Core(shape, name, depth, recompute, limit)
                    continue
                kind = SCHEDULES.get(name)
                several = kind is not None and kind.interleaves and kind.stages == 1
                depth = fixed.interleave or (DEPTHS[0] if several else 1)
                yield Core(shape, name, depth, recompute)

    def _play(self, core: Core) -> Iterator[tuple[float, Item]]:
        """The core without data traffic, and the next deeper one where that may be faster."""
        shape, model = core.shape, self._model(core.shape)
        assert model is not None
        units, stages = len(model.cuts.units), shape.pp * core.depth
        if core.name in SCHEDULES:
            try:
                kind = kind_of(core.name, shape.pp, shape.candidate.microbatches, core.depth)
            except ScheduleError as error:
                self.refused = self.refused or str(error)
                return
            stages *= kind.stages
        if stages > units and self.question.fixed.actions is None:
            self.refused = self.refused or (
                f"{stages} stages of {units} units that the model can be cut between: take at most "
                f"{units} stages"
            )
            return
        order = self._order(core, model)
        if order is None:
            return
        fixed = self.question.fixed
        listed = [whole.layout for whole, _ in self._shares(core, model)]
        if core.recompute == BY_RANK:  # which goes on to higher levels of ZeRO by itself
            least = {(one.dp_shard, one.offload): one for one in reversed(listed)}
            listed = [one for one in listed if least[one.dp_shard, one.offload] is one]
        if not listed:
            return
        made = CoreTrials(self.question, core, model, order, listed)
        plain = made.plain()
        least_s = self._update_bound(shape, model)
        self._steps[core] = plain.step_s
        if plain.step_s * (1 - RELIEF) + least_s < self._best_s:
            yield plain.step_s * (1 - RELIEF) + least_s, Played(made, plain)
        if fixed.interleave is None and core.depth in DEPTHS[:-1] and not order.written:
            place = DEPTHS.index(core.depth)
            above = [self._steps.get(replace(core, depth=depth)) for depth in DEPTHS[:place]]
            shortest_s = min((s for s in above if s is not None), default=float("inf"))
            if plain.step_s * (1 - RELIEF) < shortest_s:
                deeper = replace(core, depth=DEPTHS[place + 1])
                yield self._core_bound(deeper, model), deeper

    def _order(self, core: Core, model: Model) -> Order | None:
        pp, m = core.shape.pp, core.shape.candidate.microbatches
        lists = self.question.fixed.actions
        key: tuple[object, ...] = core.name, pp, m, core.depth
        if core.limit:
            key = (core,)
        if key not in self._orders:
            if len(self._orders) == KEPT:
                del self._orders[next(iter(self._orders))]
            self._orders[key] = None
            try:
                if lists is not None:
                    self._orders[key] = self._by_hand(lists, m)
                elif core.limit:
                    self._orders[key] = found_order(
                        core, model, self.question.cluster, self._sends(core, model)
                    )
                else:
                    made = schedule(core.name, pp, m, core.depth)
                    searched = self.question.fixed.schedule == FOUND
                    self._orders[key] = Order(
                        replace(made, name=FOUND) if searched else made, searched
                    )
            except ScheduleError as error:
                self.refused = self.refused or str(error)
        return self._orders[key]

    def _sends(self, core: Core, model: Model) -> Sends:
        """Between stages of as many devices as the core's."""
        candidate, question = core.shape.candidate, self.question
        layout = next(iter(layouts(candidate.data, question.fixed)))
        state = state_of(question, layout, candidate)
        return PipelinePrices(
            model.cuts, question.cluster, state, core.levels[0], core.shape.pp
        ).sends

    def _by_hand(self, lists: Lists, microbatches: int) -> Order:
        made = written(self.question.fixed.schedule or "", lists)
        if made.microbatches != microbatches:
            raise ScheduleError(
                f"schedule={made.name} has {made.microbatches} microbatches, which the batch of "
                f"{self.question.batch} samples is to be cut into: batch = data ranks x microbatch "
                "x microbatches"
            )
        return Order(made, written=True)


def _shape(item: Item) -> Shape:
    if isinstance(item, Shape):
        return item
    return (item if isinstance(item, Core) else item.trials.core).shape
