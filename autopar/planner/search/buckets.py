"""How a plan's replicas add up their gradients: in what buckets, and by which all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.nouns.buckets import BUCKET_BYTES, bucket_text
from autopar.nouns.layout import BUCKET, LayoutError
from autopar.nouns.reduction import TWO_LEVEL, two_level_of
from autopar.planner.ask.question import Decided, Question
from autopar.planner.search.all_reduce import check_all_reduce
from autopar.planner.solve.solved import state_of
from autopar.planner.staged.in_full import model_of
from autopar.pricing.pipeline import PipelinePrices
from autopar.pricing.reduced import Way
from autopar.pricing.state import StateSharding
from autopar.pricing.two_level import data_cut


@dataclass(frozen=True, slots=True)
class Sums:
    """As a plan has them: None is what is usual."""

    bucket_bytes: int | None = None
    all_reduce: str | None = None


def sums_of(question: Question, decided: Decided) -> Sums:
    """What is pinned, or was priced as fastest.

    Raises `LayoutError` where something is pinned that has no effect.
    """
    state = state_of(question, decided.layout, decided.candidate)
    _check_bucket(question, state)
    check_all_reduce(question, decided, state)
    pinned, two_level = question.pins.bucket, question.pins.all_reduce == TWO_LEVEL
    if question.framework != "torch" or state.fsdp or not state.mesh.batch_axes:
        return Sums()
    if decided.stages:
        return Sums(pinned)
    if pinned is None or question.pins.all_reduce is None:
        way = _priced_way(question, decided, state)
        two_level = way.two_level
        if pinned is None and way.bucket_bytes != BUCKET_BYTES:
            pinned = way.bucket_bytes
    cut = data_cut(question.cluster, state.mesh) if two_level else None
    return Sums(pinned, two_level_of(cut.inside.size) if cut is not None else None)


def _priced_way(question: Question, decided: Decided, state: StateSharding) -> Way:
    model, recompute = model_of(question, decided), decided.layout.recompute
    stage = PipelinePrices(model, question.cluster, state, recompute, 1)
    return stage.time(0, len(model.units)).way


def _check_bucket(question: Question, state: StateSharding) -> None:
    pinned, replicas = question.pins.bucket, state.mesh.ways(state.mesh.batch_axes)
    if pinned is None:
        return
    if question.framework != "torch":
        why = "XLA decides what is reduced together"
    elif replicas == 1:
        why = "no ranks hold the same parameters"
    elif state.fsdp:
        why = "FSDP2 moves whole units"
    else:
        return
    raise LayoutError(
        f"--fix {BUCKET}={bucket_text(pinned)} has no effect on this layout: {why}; leave it "
        "out, or pin dp_replicate and zero=0"
    )
