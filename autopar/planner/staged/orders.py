"""The order of actions of a core, made and kept with its clocks.

Where lists of actions are given, they are the order; where they are to be found for the model,
`staged.found` finds them; else they follow from the schedule's name, ranks, microbatches and
stages a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.pipeline.actions import Lists, ScheduleError
from autopar.pipeline.schedules.table import schedule
from autopar.pipeline.written import written
from autopar.planner.ask.candidates import Candidate, layouts
from autopar.planner.ask.question import Question
from autopar.planner.solve.solved import state_of
from autopar.planner.staged.found import FOUND, found_order
from autopar.planner.staged.pipeline_models import Model
from autopar.planner.staged.shapes import Core
from autopar.pricing.pipeline import PipelinePrices
from autopar.pricing.sends import Order, Sends

KEPT = 24
"""Orders that are kept with their clocks."""


@dataclass(slots=True)
class Orders:
    """The last `KEPT` orders that were made, and why there is none where one was refused."""

    question: Question
    _kept: dict[tuple[object, ...], Order | str] = field(default_factory=dict)

    def of(self, core: Core, model: Model) -> Order:
        """Raises `ScheduleError` where there is none, with what stands against it."""
        key: tuple[object, ...] = (core,)
        if not core.limit:
            candidate = core.shape.candidate
            key = core.name, core.shape.pp, candidate.passes, core.depth, candidate.slices
        if key not in self._kept:
            if len(self._kept) == KEPT:
                del self._kept[next(iter(self._kept))]
            try:
                self._kept[key] = self._made(core, model)
            except ScheduleError as error:
                self._kept[key] = str(error)
        order = self._kept[key]
        if isinstance(order, str):
            raise ScheduleError(order)
        return order

    def _made(self, core: Core, model: Model) -> Order:
        question, microbatches = self.question, core.shape.candidate.passes
        if question.actions is not None:
            return self._by_hand(question.actions, core.shape.candidate)
        if core.limit:
            return found_order(core, model, question.cluster, self._sends(core, model))
        slices = core.shape.candidate.slices
        made = schedule(core.name, core.shape.pp, microbatches, core.depth, slices)
        searched = question.pins.schedule == FOUND
        return Order(replace(made, name=FOUND) if searched else made, searched)

    def _by_hand(self, lists: Lists, candidate: Candidate) -> Order:
        made = written(self.question.pins.schedule or "", lists, candidate.slices)
        if made.microbatches != candidate.passes:
            of = f", each in {candidate.slices} slices" if candidate.slices > 1 else ""
            raise ScheduleError(
                f"schedule={made.name} has {made.microbatches} microbatches, which the batch of "
                f"{self.question.batch} samples is to be cut into: batch = data ranks x microbatch "
                f"x microbatches{of}"
            )
        return Order(made, written=True)

    def _sends(self, core: Core, model: Model) -> Sends:
        """Between stages of as many devices as the core's."""
        candidate, question = core.shape.candidate, self.question
        layout = next(iter(layouts(candidate.data, question.pins, model=candidate.model)))
        state = state_of(question, layout, candidate)
        return PipelinePrices(
            model.cuts, question.cluster, state, core.lightest, core.shape.pp
        ).sends
