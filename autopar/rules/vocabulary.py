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
from autopar.rules.kept import Chunked, Kept, Streamed
from autopar.rules.notation import Implemented, Internal, Rule, RuleMaker
from autopar.rules.terms import accumulated, text

LEAST_ROWS, FEWEST_ROWS = 1024, 64
"""Of a chunk, below which products reach much less (half of a device's rate at some hundred); and
where nothing fits else."""
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
    own, wide = DTYPE_BYTES[logits.dtype], DTYPE_BYTES[dtype]
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
            Kept(("t", "v"), wide),
            *([Kept(("t",), 1)] if smooth else []),
        ),
        # The logits in that dtype; gradients of log-probabilities and of logits, of which the last
        # in the logits' own dtype is counted as such.
        workspace=(Kept(("t", "v"), wide),) if own < wide else (),
        workspace_back=(
            Kept(("t", "v"), wide - own),
            Kept(("t", "v"), wide, unless=VOCABULARY_PARALLEL),
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


def _linear_cross_entropy(
    op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]
) -> Rule:
    """A product with rows v of a matrix and the loss of its rows t, whose gradients are made with
    it (`autopar.runtime.pytorch.loss_head`): what it keeps is these.

    Of the logits the compute's own dtype is read for sums, read again and written as their gradient
    (`autopar.runtime.pytorch.kernels.chunk_loss`; torch's ops do more, as they do for a loss of
    whole logits, and hold a copy in float32). Every chunk but the first adds to the gradient of the
    matrix. ``chunks`` of 0 are as many as it takes, of ``rows`` at least, and take no longer than
    one: what bounds every number of them.
    """
    del results
    x, _, weight, *bias = operands
    chunks, wide = int(op.attrs["chunks"]), accumulated(x)
    most = 0 if chunks else int(op.attrs.get("rows", LEAST_ROWS))
    chunks = chunks or 1
    own, sums = DTYPE_BYTES[x.dtype], DTYPE_BYTES[wide]
    half = own < sums
    added = (own + own + 2 * sums) if half else 2 * sums
    products = 2 + weight.differentiable
    mean = op.attrs.get("reduction", "mean") == "mean"
    matrix = ["k!", "v~"] if op.attrs.get("transposed") else ["v~", "k!"]
    copied = half and not op.attrs.get("kernel")
    logits = own + sums if copied else own
    if op.attrs.get("ignore_index", -100) is None:  # of JAX: XLA writes the gradient beside them
        logits = 2 * (sums if op.attrs.get("wide") else own)
    workspace = [Kept(("t", "v"), logits)]
    if weight.dtype != x.dtype:
        workspace.append(Kept(("v", "k"), own))  # the matrix in the dtype of x
    if weight.differentiable and half and (chunks > 1 or most):
        workspace.append(Kept(("v", "k"), sums))  # the sum, beside what is added
    return Rule(
        text(
            [["t+", "k!"], ["t+"], matrix, *([["v~"]] if bias else [])],
            [[]],
        ),
        keeps=(
            *([Kept(("t", "k"), own)] if x.differentiable else []),
            *([Kept(("v", "k"), own)] if weight.differentiable else []),
            *([Kept(("v",), own)] if bias and bias[0].differentiable else []),
        ),
        workspace=tuple(workspace),
        streams=(
            Streamed(("t", "v"), 3 * own),
            Streamed(("v", "k"), (chunks - 1) * (added if weight.differentiable else 0)),
        ),
        chunked=Chunked("t", chunks, products, most),
        implementations=(
            Implemented(
                "v",
                VOCABULARY_PARALLEL,
                (
                    Internal("all_reduce", "forward", ("t",), 1, wide),
                    Internal("all_reduce", "forward", ("t",), 2, wide),
                ),
            ),
            *([Implemented("t", GLOBAL_COUNT)] if mean else []),
        ),
        flop_terms=((2.0 * products, ("t", "v", "k")),),
        products=(),
        sides=((("t",), ()), (("v",), ()), (("k",), ())),
        cost="matmul",
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
    "linear_cross_entropy": _linear_cross_entropy,
}
