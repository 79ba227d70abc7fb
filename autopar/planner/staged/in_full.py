"""What has won, priced in full: lowered on its own mesh."""

from __future__ import annotations

from autopar.lowering.stages import stage_parts
from autopar.planner.ask.question import Answer, Decided, Question
from autopar.planner.solve.solved import lowered_of, state_of
from autopar.pricing.bounds import state_bytes
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Cuts
from autopar.pricing.pipeline import PipelinePrices
from autopar.pricing.planned import choices_of
from autopar.pricing.priced import price, priced


def model_of(question: Question, decided: Decided) -> CutModel:
    """What is decided, lowered on its own mesh, with its prices there."""
    lowered = lowered_of(question, decided)
    prices = question.prices(lowered.mesh)
    return CutModel(Cuts.of(lowered), None, prices, question.framework)


def priced_again(question: Question, answer: Answer) -> Answer:
    """What is decided, at the prices of ``question``, which may hold other pins."""
    decided = answer.decided
    if decided.stages:
        return settled(question, decided)
    state = state_of(question, decided.layout, decided.candidate)
    return Answer(decided, price(model_of(question, decided), state, decided.layout.recompute))


def settled(question: Question, decided: Decided) -> Answer:
    """The same decisions, lowered on their own mesh and priced there.

    Raises `CutError` where the model cannot be cut so after all.
    """
    layout, order = decided.layout, decided.order
    assert order is not None
    cuts = model_of(question, decided)
    state = state_of(question, layout, decided.candidate)
    stages = PipelinePrices(cuts, question.cluster, state, layout.recompute, decided.pp)
    stages = stages.staged(order.schedule, choices_of(decided.stages, order.schedule))
    places = {name: i for i, name in enumerate(cuts.units)}
    ends = (*(places[stage.first] for stage in decided.stages[1:]), len(cuts.units))
    stage_parts(cuts.lowered, decided.stages)
    return Answer(decided, priced(stages, order, ends, state_bytes(question.graph)))
