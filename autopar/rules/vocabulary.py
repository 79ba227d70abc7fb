"""Embedding and loss, split over the vocabulary where an axis asks for it.

Both split unevenly: vocabularies are rarely multiples of the axis. (Megatron-LM: Shoeybi et al.
2019, section 3.)
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules.implementations.table import (
    GLOBAL_COUNT,
    MASKED_LOOKUP,
    VOCABULARY_PARALLEL,
)
from autopar.rules.kept import Kept
from autopar.rules.notation import Implemented, Internal, Rule, RuleMaker
from autopar.rules.terms import accumulated, text

LOSS_FLOPS = 8.0  # per logit: maximum, subtract, exponential, sum


def _cross_entropy(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Rows t are summed (a mean divides by the global count); v is resolved inside.

    Where an axis splits v: first the maximum of each row, then together the sum of exponentials and
    the logit of the label (and the sum of all logits under label smoothing). Nothing in backward.
    """
    del results
    smooth = float(op.attrs.get("label_smoothing", 0.0)) > 0
    logits, labels = operands[0], operands[1]
    dtype = accumulated(logits)
    reduction = op.attrs.get("reduction", "mean")
    one_per_row = reduction == "none"
    row = "t" if one_per_row else "t+"
    targets = [row] if len(labels.shape) == 1 else [row, "v~"]
    return Rule(
        text([[row, "v~"], targets], [["t"] if one_per_row else []]),
        saves=(1,),
        # The log-probabilities: backends compute a loss in float32 at least, and keep that.
        # Smoothing keeps which rows count, too.
        keeps=(
            Kept(("t", "v"), DTYPE_BYTES[dtype]),
            *([Kept(("t",), 1)] if smooth else []),
        ),
        implementations=(
            Implemented(
                "v",
                VOCABULARY_PARALLEL,
                (
                    Internal("all_reduce", "forward", ("t",), 1, dtype),
                    Internal("all_reduce", "forward", ("t",), 3 if smooth else 2, dtype),
                ),
            ),
            *([Implemented("t", GLOBAL_COUNT)] if reduction == "mean" else []),
        ),
        flops=LOSS_FLOPS,
        cost="reduction",
    )


VOCABULARY: Mapping[str, Rule | RuleMaker] = {
    "embedding": Rule(
        "..., v~+ d -> ... d",
        saves=(0,),
        implementations=(Implemented("v", MASKED_LOOKUP),),
        flops=0.0,
        cost="gather",
    ),
    "cross_entropy": _cross_entropy,
}
