"""A pipeline priced in full: every rank's memory and clock, by the decisions of each stage."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.physics import broken
from autopar.lowering.stages import stage_parts
from autopar.planner.ask.question import Answer, Decided, Question
from autopar.planner.solve.solved import lowered_of, state_of
from autopar.pricing.bounds import pipeline_bounds, state_bytes
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Cuts
from autopar.pricing.pipeline import PipelinePrices, runs_of
from autopar.pricing.planned import choices_of
from autopar.pricing.priced import Priced
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Ends, Order


def piped(
    question: Question, decided: Decided, prices: PipelinePrices, order: Order, ends: Ends
) -> Answer:
    """``prices``: with what each stage of ``decided`` chooses; ``order``: its own."""
    runs = runs_of(ends, order.schedule)
    ranks = prices.memory(runs, order.schedule)
    each = decided.spread.mesh.device_count
    time = prices.step(runs, order.schedule, *prices.clocked(runs, order))
    memory = max(ranks, key=lambda memory: memory.total / memory.limit)
    hosted = max(ranks, key=lambda memory: memory.host / max(1, memory.host_limit))
    memory = replace(memory, host=hosted.host, host_limit=hosted.host_limit)
    alarm = broken(pipeline_bounds(ranks, each, state_bytes(question.graph)))
    return Answer(decided, Priced(time, memory, alarm))


def settled(question: Question, decided: Decided) -> Answer:
    """The same decisions, lowered on their own mesh and priced there.

    Raises `CutError` where the model cannot be cut so after all.
    """
    layout, order = decided.layout, decided.order
    assert order is not None
    lowered = lowered_of(question, decided)
    prices = Prices(question.cluster, lowered.mesh, question.precision, question.fusion)
    cuts = CutModel(Cuts.of(lowered), None, prices, question.framework)
    state = state_of(question, layout, decided.candidate)
    stages = PipelinePrices(cuts, question.cluster, state, layout.recompute, decided.pp)
    stages = stages.staged(order.schedule, choices_of(decided.stages, order.schedule))
    places = {name: i for i, name in enumerate(cuts.units)}
    ends = (*(places[stage.first] for stage in decided.stages[1:]), len(cuts.units))
    stage_parts(lowered, decided.stages)
    return piped(question, decided, stages, order, ends)
