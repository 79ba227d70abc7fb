"""Lower bounds of the search over pipelines: no plan of a shape or core is faster.

By a model of other samples (`Likeness`) the same is an estimate of what is not solved yet: it
assumes that the same shardings are best, and that others free as much at no cost.

What they assume of the cost model: a device is no faster with a part of an op than with all of it,
per sample no faster with fewer samples, and takes no less for more; where devices differ, a kind
gains no more over the slowest than it does where one device has all of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.nouns.offload import OFFLOAD
from autopar.nouns.recompute import KEEP_ALL, Recompute
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.planner.ask.candidates import Candidate, StateLayout, layouts, offloaded
from autopar.planner.ask.question import Question
from autopar.planner.problem.posed import NOT_KNOWN
from autopar.planner.solve.solved import state_of
from autopar.planner.staged.pipeline_models import (
    BACKWARD,
    FORWARD,
    INPUTS,
    ITSELF,
    PASS,
    Likeness,
    Model,
    Models,
    Pace,
    Whole,
)
from autopar.planner.staged.shapes import Core, Shape
from autopar.pricing.memory import held_of_state, overhead
from autopar.pricing.offload import streamed_slope

SPARE = 1.05
"""Of its memory, what a rank may need in a cut into equal parts for the core to be tried."""
NEAR = 0.8
"""Of its memory, what a rank must need in a cut into equal parts for state to be offloaded, and for
a leaner sharding to be tried."""
WAITED = 0.6
"""Share of a microbatch's time that no schedule can put off (forward, and gradients of inputs),
at least, of a model that is not solved yet."""


Share = tuple[Whole, float]
"""All of the model under a layout of state, and bytes of a rank."""


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """Seconds of a step, by what ``models`` know by now."""

    question: Question
    models: Models

    def shape_s(self, shape: Shape) -> float:
        """By its sharding where that is solved, else by what is known of others."""
        m, views = shape.candidate.passes, shape.views(self.question.cluster)
        model, alone = self.models.known(shape), self.models.alone
        if model is not None:
            pace, whole = model.pace(views, KEEP_ALL), model.whole[KEEP_ALL]
            waited_s = model.pass_s - whole.weights_s
            least_s = max(m * model.pass_s / pace.ranks, waited_s / pace.fastest)
            if pace == Pace(shape.pp, 1.0) and shape.candidate.slices == 1:
                least_s = max(least_s, whole.forward_s + m * whole.backward_s / shape.pp)
            return least_s + self.update_s(shape, model)
        pace = Pace(shape.pp, 1.0) if alone is None else alone.pace(views, KEEP_ALL)
        return self.models.least_pass_s(shape) * max(m / pace.ranks, WAITED / pace.fastest)

    def core_s(self, core: Core, model: Model, like: Likeness = ITSELF) -> float:
        """The most of: the work of the mean rank; what a microbatch waits for; the work of the mean
        rank with what it waits for before its first action and, where backward is whole, after its
        last, which where each rank has one stage is known for the cut that is best for that; and
        the backward work of the mean rank behind what its first waits for: all of one microbatch's
        forward, and its way back through the stages behind the rank's."""
        whole, views = model.whole[core.lightest], core.shape.views(self.question.cluster)
        pace = model.pace(views, core.lightest)
        m, p = core.shape.candidate.passes, core.shape.pp
        pass_s = (whole.forward_s + whole.backward_s) * like.seconds
        kind = SCHEDULES.get(core.name)
        splits_backward = (kind is None or kind.splits) and not core.lightest.runs_again
        waited_s = pass_s - (whole.weights_s * like.seconds if splits_backward else 0.0)
        least_s = max(m * pass_s / pace.ranks, waited_s / pace.fastest)
        simple = kind is not None and kind.stages == core.depth == 1 and not kind.even_ranks
        if simple and pace == Pace(p, 1.0):
            # With x[r] the share of a pass before rank r: m (x[r+1] - x[r]) + waits x[r] <= step.
            waits = whole.forward_s * like.seconds / pass_s if splits_backward else 1.0
            least_s = max(least_s, pass_s * waits / (1 - (1 - waits / m) ** p))
        along = kind is not None and not kind.even_ranks and self.question.actions is None
        if along and pace == Pace(p, 1.0):
            # The first stage of rank r is stage r. Each stage before it has a unit at least.
            waited_s = model.least_waits_s(core.lightest, p, FORWARD if splits_backward else PASS)
            least_s = max(least_s, (m * pass_s + waited_s * like.seconds) / p)
        if pace == Pace(p, 1.0) and core.shape.candidate.slices == 1:
            behind = INPUTS if splits_backward else BACKWARD
            waited_s = model.least_waits_s(core.lightest, p, behind) if along else 0.0
            after_s = (m * whole.backward_s + waited_s) / p
            least_s = max(least_s, (whole.forward_s + after_s) * like.seconds)
        return least_s + self.update_s(core.shape, model)

    def update_s(self, shape: Shape, model: Model) -> float:
        """The optimizer where all ranks share it; nothing where devices differ."""
        if len(self.question.cluster.kinds) > 1:
            return 0.0
        return model.whole[KEEP_ALL].update_s / (shape.pp * shape.candidate.parts)

    def fitting(
        self, core: Core, model: Model, shares: Sequence[Share], like: Likeness = ITSELF
    ) -> tuple[float, float]:
        """Bytes of the first rank where every rank has as much of the model, in the layout of state
        that needs least; and seconds of the mean rank's work in the fastest layout that fits then.

        No schedule holds fewer microbatches on the first rank than there are ranks. ``shares``: of
        the core.
        """
        question, shape = self.question, core.shape
        m, pp = shape.candidate.passes, shape.pp
        views = shape.views(question.cluster)
        needed = min((size for _, size in shares), default=float("inf"))
        fitting = self._roomy(shape, shares)
        if not fitting:
            return needed, float("inf")
        pass_s = model.least_pass_s(fitting, core.lightest, question.cluster)
        # What state moves with a pass is no better hidden behind fewer samples.
        whole = model.whole[core.lightest]
        pass_s -= (whole.forward_s + whole.backward_s) * (1.0 - like.seconds)
        late_s = min(whole.streamed_s for whole in fitting) / pp
        return needed, m * pass_s / model.pace(views, core.lightest).ranks + late_s

    def leaner_s(self, core: Core, model: Model, compares: bool) -> float:
        """The same of a core whose ranks hold as little as other shardings may free, at no cost;
        where there is a plan to beat (``compares``), of state and of activations each by itself:
        where there is none, what may need least is told to whoever asks for less."""
        flights = min(core.shape.candidate.passes, core.shape.pp)  # on the first rank, at most
        solved = model.solved
        least = solved.least if compares else NOT_KNOWN
        freed = Likeness(freed=flights * solved.squeezable, least=least)
        _, work_s = self.fitting(core, model, [*self.shares(core, model, freed)])
        return max(self.core_s(core, model), work_s)

    def may_beat(self, best_s: float, cores: Iterable[Core], model: Model, like: Likeness) -> bool:
        """Whether a core of one shape that fits may take less."""
        shares: dict[Recompute | None, list[Share]] = {}
        for core in cores:
            if self.core_s(core, model, like) >= best_s:
                continue
            if core.recompute not in shares:
                shares[core.recompute] = [*self.shares(core, model, like)]
            _, work_s = self.fitting(core, model, shares[core.recompute], like)
            if work_s < best_s:
                return True
        return False

    def short(self, core: Core, shares: Sequence[Share]) -> bool:
        """Whether under every layout that keeps state on devices ranks have no memory to spare."""
        enough = NEAR * self._room(core.shape)
        on_devices = (size for whole, size in shares if whole.layout.offload == OFFLOAD[0])
        return all(size > enough for size in on_devices)

    def shares(self, core: Core, model: Model, like: Likeness = ITSELF) -> Iterator[Share]:
        """All of the model under each layout of state, with bytes of the first rank where every
        rank has as much of it. Behind a layout that comes near to what a rank has stands the same
        with the optimizer's state offloaded. They do not hang on the schedule."""
        question, shape = self.question, core.shape
        m, pp = shape.candidate.passes, shape.pp
        recompute = core.lightest
        life = model.solved.summary.life(recompute)
        share, process = overhead(model.solved.summary.packages, question.cluster.device)
        flying = min(m, pp) * life.saved / pp * like.bytes
        inside, least = (life.peak - life.saved) * like.bytes, like.least
        # Of what is made again inside of a block other shardings may free as much as of what is
        # kept where none is.
        kept = least.again if recompute.runs_again else least.kept
        lean = flying * kept + inside * min(least.kept, least.again)
        candidate, enough = shape.candidate, NEAR * self._room(shape)
        pins = replace(question.pins, recompute=recompute)
        for layout in layouts(candidate.data, pins, model=candidate.model):
            for one in (layout, offloaded(layout)) if question.offloads else (layout,):
                whole = self._whole(one, shape.candidate, model)
                held = max(
                    (whole.state_bytes - like.freed) / pp + flying + inside,
                    whole.state_bytes * least.state / pp + lean,
                )
                needed = (1 + share) * held + process
                yield whole, needed
                if needed <= enough:
                    break

    def roomy(self, core: Core, model: Model) -> list[Whole]:
        """All of the model under the layouts that may fit; where none may, or ranks have devices of
        several kinds and so parts of several sizes, under all."""
        shares = [*self.shares(core, model)]
        alike = len(self.question.cluster.kinds) == 1
        return (alike and self._roomy(core.shape, shares)) or [whole for whole, _ in shares]

    def _roomy(self, shape: Shape, shares: Sequence[Share]) -> list[Whole]:
        room = SPARE * self._room(shape)
        return [whole for whole, size in shares if size <= room]

    def _room(self, shape: Shape) -> float:
        """Memory of a rank, in the mean."""
        views = shape.views(self.question.cluster)
        return sum(view.device.memory_bytes for view in views) / shape.pp

    def _whole(self, layout: StateLayout, candidate: Candidate, model: Model) -> Whole:
        if layout not in model.layouts:
            state = state_of(self.question, layout, candidate)
            *on_device, host = held_of_state(model.solved.summary, state)
            devices = [group.device for group in self.question.cluster.groups]
            late_s = host and host * min(map(streamed_slope, devices))
            model.layouts[layout] = Whole(layout, state, sum(on_device), late_s)
        return model.layouts[layout]
