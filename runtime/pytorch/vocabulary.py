"""Embedding and cross-entropy whose vocabulary is split over a mesh axis.

Rank r of w holds the rows ``[r * c, (r + 1) * c)`` of the v rows, ``c = ceil(v / w)``; the last
rank may hold fewer, and none is allowed. Megatron-LM (Shoeybi et al. 2019, section 3) has both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.collectives import apply, piece

Axes = str | tuple[str, ...]


def embedding(
    ids: Tensor, weight: Tensor, vocabulary: int, axis: Axes, padding_idx: int | None = None
) -> Tensor:
    """Rows of a table of which each rank of ``axis`` (or axes) holds a piece: a partial sum.

    ids [...] int64, weight [rows of this rank, d] -> [..., d], zero where another rank has the row.
    """
    start, _ = piece(vocabulary, *_axes(axis))
    rows = weight.shape[0]
    if rows == 0:
        return weight.sum() + weight.new_zeros((*ids.shape, weight.shape[1]))
    mine = ids - start
    elsewhere = (mine < 0) | (mine >= rows)
    if padding_idx is not None:
        padding_idx -= start
        if not 0 <= padding_idx < rows:
            padding_idx = None
    taken = F.embedding(mine.masked_fill(elsewhere, 0), weight, padding_idx)
    return taken.masked_fill(elsewhere.unsqueeze(-1), 0)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    count: Tensor | int | None = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocabulary: int | None = None,
    axis: Axes | None = None,
) -> Tensor:
    """Sum of the cross-entropies of this rank's tokens, over ``count``, the tokens of the batch.

    logits [t, v] (this rank's piece of v with ``axis``), labels [t] -> scalar, or [t] where
    ``count`` is None. Half-precision logits are computed with in float32. The shares of all ranks
    that split t add up to the mean.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if axis is None:
        total = F.cross_entropy(
            logits,
            labels,
            ignore_index=ignore_index,
            reduction="none" if count is None else "sum",
            label_smoothing=label_smoothing,
        )
        return total if count is None else total / count
    assert vocabulary is not None
    axes = _axes(axis)
    losses: Tensor = apply(_VocabularyParallel, logits, labels, vocabulary, axes, label_smoothing)
    losses = losses.masked_fill(labels == ignore_index, 0)
    return losses if count is None else losses.sum() / count


def _axes(axis: Axes) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def _over(x: Tensor, axes: tuple[str, ...], op: str = "sum") -> Tensor:
    for axis in axes:
        x = transport.all_reduce(x, axis, op)
    return x


class _VocabularyParallel(Function):
    """Per token: ``log sum exp(logits) - logits[label]``, or the mix with the mean over v.

    With smoothing e: ``logsumexp - (1 - e) * logits[label] - e / v * sum(logits)``. The gradient is
    ``softmax - (1 - e) * onehot - e / v``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocabulary: int,
        axes: tuple[str, ...],
        smoothing: float,
    ) -> Tensor:
        start, _ = piece(vocabulary, *axes)
        tokens, rows = logits.shape
        if rows:
            highest = logits.amax(1)
        else:
            highest = logits.new_full((tokens,), float("-inf"))
        highest = _over(highest, axes, "max")
        exps = (logits - highest.unsqueeze(1)).exp_()
        mine = labels - start
        elsewhere = (mine < 0) | (mine >= rows)
        column = mine.masked_fill(elsewhere, 0)
        if rows:
            label = logits.gather(1, column.unsqueeze(1)).squeeze(1) - highest
            label = label.masked_fill(elsewhere, 0)
        else:
            label = torch.zeros_like(highest)
        parts = [exps.sum(1), label]
        if smoothing:
            parts.append((logits - highest.unsqueeze(1)).sum(1))
        sums = _over(torch.stack(parts), axes)
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(1)), column, elsewhere)
        ctx.constants = (vocabulary, smoothing)
        if smoothing:
            taken = (1 - smoothing) * sums[1] + smoothing / vocabulary * sums[2]
            return sums[0].log() - taken
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, column, elsewhere = ctx.saved_tensors
        vocabulary, smoothing = ctx.constants
        result = softmax * grad.unsqueeze(1)
        if softmax.shape[1]:
            taken = (grad * (smoothing - 1)).masked_fill(elsewhere, 0)
            result.scatter_add_(1, column.unsqueeze(1), taken.unsqueeze(1))
        if smoothing:
            result.sub_((grad * (smoothing / vocabulary)).unsqueeze(1))
        return result, None, None, None, None
