"""Losses of given logits, and their gradient, which may take the logits' place.

Of a whole vocabulary: `chunk_loss` for autograd, `loss_and_gradient` for a loop over chunks of rows
that reuses one buffer of logits. Of a vocabulary that is split over ranks: `statistics` of the
local columns, the caller's collectives (`cross_entropy.Statistics` says how pieces add up),
`cross_entropy.losses`, and `gradient`. Rows, labels and losses are 1-dimensional, R of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch.kernels.cross_entropy import (
    PLAIN,
    CrossEntropy,
    Statistics,
    empty_statistics,
    losses,
    reference,
)
from autopar.runtime.pytorch.kernels.launch import blocks, check_dtypes, launch, power_of_two

__all__ = ["chunk_loss", "gradient", "loss_and_gradient", "reference", "statistics"]

BLOCK = 4096
"""Columns that a program holds at a time."""


def chunk_loss(logits: Tensor, labels: Tensor, form: CrossEntropy = PLAIN) -> Tensor:
    """Losses, float32 [R], of logits [R, V] and labels int64 [R]; differentiable by logits."""
    result: Tensor = _ChunkLoss.apply(logits, labels, form)  # type: ignore[no-untyped-call]
    return result


def loss_and_gradient(
    logits: Tensor,
    labels: Tensor,
    form: CrossEntropy = PLAIN,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Losses [R], and the gradient [R, V] of their sum weighted by ``weights`` (float32 [R] or a
    scalar, 1 each by default), in the dtype of logits. ``out`` gets it, and may be ``logits``."""
    numbers = statistics(logits, labels, 0, form)
    loss, log_sum_exp = losses(numbers, labels, logits.shape[1], form)
    return loss, gradient(logits, labels, 0, log_sum_exp, form, weights, out=out)


def statistics(
    logits: Tensor, labels: Tensor, first: int = 0, form: CrossEntropy = PLAIN
) -> Statistics:
    """Of logits [R, V'], columns ``first`` to ``first + V'`` of the vocabulary; labels count over
    all of it."""
    check_dtypes("chunk_loss", logits)
    logits = _by_rows(logits)
    rows, columns = logits.shape
    numbers = empty_statistics(logits, (rows,), form.smooths)
    launch(
        "cross_entropy.row_statistics",
        (rows,),
        logits,
        labels.contiguous(),
        numbers.top,
        numbers.total,
        numbers.target,
        numbers.top if numbers.summed is None else numbers.summed,
        columns,
        logits.stride(0),
        first,
        form.scale,
        form.softcap,
        SOFTCAP=form.softcap != 0.0,
        SUMS=form.smooths,
        BLOCK=_block(columns),
        num_warps=8,
    )
    return numbers


def gradient(
    logits: Tensor,
    labels: Tensor,
    first: int,
    log_sum_exp: Tensor,
    form: CrossEntropy = PLAIN,
    weights: Tensor | None = None,
    vocabulary: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """d (weights . losses) / d logits, [R, V'] in the dtype of logits.

    log_sum_exp: float32 [R], over the whole vocabulary.
    weights:     the gradient of each loss, float32 [R] or a scalar; 1 by default.
    vocabulary:  columns of all pieces; needed for smoothed labels, V' by default.
    out:         gets the result, with columns side by side; may be ``logits``, else is left as new.
    """
    check_dtypes("chunk_loss", logits, out)
    logits = _by_rows(logits)
    rows, columns = logits.shape
    if out is None:
        out = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    if out.shape != logits.shape or out.stride(1) != 1:
        raise ValueError(f"out must be {list(logits.shape)} with columns side by side")
    if weights is None:
        weights = torch.ones((), device=logits.device)
    block = _block(columns)
    launch(
        "cross_entropy.row_gradient",
        (rows, blocks(columns, block)),
        logits,
        out,
        labels.contiguous(),
        log_sum_exp.contiguous(),
        weights.float().expand(rows).contiguous(),
        columns,
        logits.stride(0),
        out.stride(0),
        first,
        form.ignore_index,
        form.scale,
        form.softcap,
        1 - form.label_smoothing,
        form.label_smoothing / (vocabulary or columns),
        SOFTCAP=form.softcap != 0.0,
        BLOCK=block,
        num_warps=8,
    )
    return out


def _block(columns: int) -> int:
    return min(BLOCK, power_of_two(columns))


def _by_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


class _ChunkLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, form: CrossEntropy) -> Tensor:
        loss, log_sum_exp = losses(
            statistics(logits, labels, 0, form), labels, logits.shape[1], form
        )
        ctx.save_for_backward(logits, labels, log_sum_exp)
        ctx.form = form
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, log_sum_exp = ctx.saved_tensors
        return gradient(logits, labels, 0, log_sum_exp, ctx.form, grad), None, None
