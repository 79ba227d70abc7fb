"""In what buckets a plan's replicas add up their gradients."""

from __future__ import annotations

from autopar.nouns.axes import BATCH
from autopar.nouns.buckets import BUCKET_BYTES, bucket_text
from autopar.nouns.layout import BUCKET, LayoutError
from autopar.planner.ask.question import Decided, Question
from autopar.planner.solve.solved import lowered_of, state_of
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Cuts
from autopar.pricing.pipeline import PipelinePrices
from autopar.pricing.prices import Prices


def bucket_bytes_of(question: Question, decided: Decided) -> int | None:
    """Pinned ones, or those that were priced as fastest; None: the usual ones.

    Raises `LayoutError` where they are pinned and nothing is added up in buckets.
    """
    state, pinned = state_of(question, decided.layout, decided.candidate), question.pins.bucket
    replicas = state.mesh.ways([a for a in state.mesh.axes if a in BATCH])
    if question.framework != "torch" or state.fsdp or replicas == 1:
        if pinned is None:
            return None
        why = "no ranks hold the same parameters" if replicas == 1 else "FSDP2 moves whole units"
        why = why if question.framework == "torch" else "XLA decides what is reduced together"
        raise LayoutError(
            f"--fix {BUCKET}={bucket_text(pinned)} has no effect on this layout: {why}; leave it "
            "out, or pin dp_replicate and zero=0"
        )
    if pinned is not None or decided.stages:
        return pinned
    lowered = lowered_of(question, decided)
    prices = Prices(question.cluster, lowered.mesh, question.precision, question.fusion)
    model = CutModel(Cuts.of(lowered), None, prices, question.framework)
    recompute = decided.layout.recompute
    time = PipelinePrices(model, question.cluster, state, recompute, 1).time(0, len(model.units))
    return None if time.bucket_bytes == BUCKET_BYTES else time.bucket_bytes
