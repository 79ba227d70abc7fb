"""The last product of a model and its cross-entropy, in chunks of rows: logits of one chunk at a
time are there, and their gradient takes their place.

With z = x W^T for N rows x of width k and a vocabulary of v, p the softmax of z and y the labels as
rows of zeros with a one, the gradient of the sum of losses is (p - y) W for x and (p - y)^T x for
W. Both are made in the forward, while a chunk's logits are there: three products as ever, and
N / chunks x v logits in place of N x v; each chunk reads W twice and adds to its gradient once
(Hsu et al. 2024, Liger Kernel). Backward multiplies them by what arrives, and writes
into nothing that was kept: it may run twice.

Where ranks split the vocabulary, rows' maxima are joined and then the sums over their columns,
chunk by chunk, as `autopar.runtime.pytorch.vocabulary` does for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.collectives import apply, piece
from autopar.runtime.pytorch.kernels.cross_entropy import CrossEntropy
from autopar.runtime.pytorch.loss_head_kernel import losses_by_kernel
from autopar.runtime.shared.settings import ProgramError

Axes = str | tuple[str, ...]
TILE_BYTES = 1 << 20
"""Of the logits that a CPU takes through all steps at once, so that they stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Head:
    """What does not change from row to row. ``first``: column of the whole vocabulary with which
    this rank's piece begins; ``cap`` and ``scale``: logits are cap x tanh(scale x z / cap)."""

    chunks: int
    vocabulary: int
    axes: tuple[str, ...]
    first: int
    ignore_index: int
    smoothing: float
    scale: float
    cap: float | None
    kernel: str = "torch"


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    count: Tensor | int = 1,
    chunks: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    cap: float | None = None,
    vocabulary: int | None = None,
    axis: Axes | None = None,
    kernel: str = "torch",
) -> Tensor:
    """Sum of the cross-entropies of this rank's tokens, over ``count``, the tokens of the batch.

    x [t, k], weight [v, k] and bias [v] (this rank's piece of v with ``axis``, or axes), labels [t]
    -> scalar, in float32 at least. ``chunks``: of so many as equal as they can be, one after the
    other. The products have the dtype of x; a weight of more bits gets its gradient in its own.
    ``kernel``: of the losses, ``torch`` or ``triton``, which runs on CUDA and not in float64.
    """
    if kernel not in ("torch", "triton"):
        raise ProgramError(f"a loss head has kernels torch and triton, and none {kernel!r}")
    axes = () if axis is None else (axis,) if isinstance(axis, str) else axis
    whole = weight.shape[0] if vocabulary is None else vocabulary
    first = piece(whole, *axes)[0] if axes else 0
    head = Head(chunks, whole, axes, first, ignore_index, label_smoothing, scale, cap, kernel)
    every = [one for one in (x, weight, bias) if one is not None]
    trains = torch.is_grad_enabled() and any(one.requires_grad for one in every)
    total: Tensor = apply(_LinearCrossEntropy, x, weight, bias, labels, head, trains)
    return total / count


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """Of rows; the first ones have one more where they do not divide."""
    each, more = divmod(rows, chunks)
    return [each + (i < more) for i in range(chunks)]


class _LinearCrossEntropy(Function):
    """The sum of losses; its gradients are made beside it and kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: Head,
        trains: bool,
    ) -> Tensor:
        made = _Gradients(x, weight, bias, head.chunks, ctx.needs_input_grad[:3], trains)
        narrow = weight.to(x.dtype)
        sizes = chunk_sizes(x.shape[0], head.chunks)
        total = x.new_zeros((), dtype=_wide(x.dtype))
        for rows, own in zip(torch.split(x, sizes), torch.split(labels, sizes), strict=True):
            logits = F.linear(rows, narrow, None if bias is None else bias.to(x.dtype))
            keep = own != head.ignore_index
            total += _losses(logits, own, head, trains).masked_fill(~keep, 0).sum()
            if trains:
                made.add(logits, rows, narrow, keep.to(x.dtype).unsqueeze(1))
            del logits  # before the next chunk's are made
        if trains:
            ctx.save_for_backward(*made.kept())
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = (None if one is None else one * grad for one in ctx.saved_tensors)
        return (*given, None, None, None)


class _Gradients:
    """Of the sum of losses; those of parameters are added up over chunks, in float32 at least where
    there are several."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunks: int,
        wanted: tuple[bool, ...],
        trains: bool,
    ) -> None:
        self.wants_x, self.wants_weight, self.wants_bias = wanted
        self.dtypes = weight.dtype, None if bias is None else bias.dtype
        self.adds_in = _wide(x.dtype) if chunks > 1 else x.dtype
        self.of_x = torch.empty_like(x) if trains and self.wants_x else None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None
        self.row = 0

    def add(self, gradient: Tensor, rows: Tensor, weight: Tensor, keep: Tensor) -> None:
        """Of one chunk; ``gradient``: of its logits, ``keep`` [rows, 1]: 0 of rows that do not
        count."""
        end = self.row + rows.shape[0]
        if self.of_x is not None:
            self.of_x[self.row : end] = (gradient @ weight).mul_(keep)
        if self.wants_weight:
            self.of_weight = self._product_added(self.of_weight, gradient.t(), rows * keep)
        if self.wants_bias:
            self.of_bias = self._product_added(self.of_bias, gradient.t(), keep)
        self.row = end

    def _product_added(self, sums: Tensor | None, one: Tensor, other: Tensor) -> Tensor:
        if sums is None:
            return (one @ other).to(self.adds_in)
        if sums.dtype == one.dtype:
            return sums.addmm_(one, other)
        return sums.add_(one @ other)

    def kept(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        of_bias = None if self.of_bias is None else self.of_bias.squeeze(1)
        of_weight, of_bias = (
            None if one is None else one.to(dtype)
            for one, dtype in zip((self.of_weight, of_bias), self.dtypes, strict=True)
        )
        return self.of_x, of_weight, of_bias


class _Rows(NamedTuple):
    """Of each row of a tile: its highest logit, the logarithm of the sum of their exponentials,
    what the loss has less than that, the column of its label and whether that is here, the label's
    share of the softmax."""

    highest: Tensor
    log_sum: Tensor
    taken: Tensor
    column: Tensor
    mine: Tensor
    share: Tensor


def _losses(logits: Tensor, labels: Tensor, head: Head, trains: bool) -> Tensor:
    """Of a chunk's rows; where it trains, ``logits`` are then the gradient of each row's loss."""
    if (
        head.kernel == "triton"
        and logits.is_cuda
        and logits.dtype != torch.float64
        and logits.numel()
    ):
        form = CrossEntropy(head.ignore_index, head.smoothing, head.cap or 0.0, head.scale)
        over = partial(_over, head) if head.axes else None
        return losses_by_kernel(logits, labels, form, head.first, head.vocabulary, trains, over)
    size = _rows_at_once(logits)
    tiles, losses = torch.split(logits, size), list[Tensor]()
    if not head.axes:
        for tile, own in zip(tiles, torch.split(labels, size), strict=True):
            wide = _transformed(tile, head)
            slope = _slope(wide, head) if trains else None
            softmax, rows = _softmax(wide, own, head)
            losses.append(rows.log_sum - rows.taken)
            if trains:
                tile.copy_(_times(_less_labels(softmax, rows, rows.share, head), slope))
        return torch.cat(losses)
    return _joined(tiles, torch.split(labels, size), head, trains)


def _joined(tiles: Sequence[Tensor], labels: Sequence[Tensor], head: Head, trains: bool) -> Tensor:
    """Of rows of which each rank along the head's axes has some columns: a softmax over these alone
    is that over all, times exp(their log-sum less the whole one)."""
    every, slopes = [], []
    for tile, own in zip(tiles, labels, strict=True):
        wide = _transformed(tile, head)
        slopes.append(_slope(wide, head) if trains else None)
        softmax, rows = _softmax(wide, own, head)
        tile.copy_(softmax)
        every.append(rows)
    highest = _over(head, torch.cat([rows.highest for rows in every]), "max")
    log_sum = torch.cat([rows.log_sum for rows in every])
    parts = [(log_sum - highest).exp(), torch.cat([rows.taken for rows in every])]
    joined = _over(head, torch.stack(parts), "sum")
    whole, taken = joined[0].log() + highest, joined[1]
    if trains:
        factors = torch.split((log_sum - whole).exp(), [len(tile) for tile in tiles])
        for tile, rows, slope, factor in zip(tiles, every, slopes, factors, strict=True):
            tile.mul_(factor.unsqueeze(1))
            tile.copy_(_times(_less_labels(tile, rows, rows.share * factor, head), slope))
    return whole - taken


def _softmax(logits: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, _Rows]:
    """Of the columns that are here. A row's highest share is no less than one over their number, so
    that its logarithm is exact where those of others may not be."""
    if head.axes:
        mine = (labels >= head.first) & (labels < head.first + logits.shape[1])
    else:  # any other is an error of `gather`
        mine = labels != head.ignore_index
    column = (labels - head.first).masked_fill(~mine, 0).unsqueeze(1)
    if not logits.shape[1]:
        nothing = logits.new_zeros(labels.shape)
        least = torch.full_like(nothing, float("-inf"))
        return logits, _Rows(least, least, nothing, column, mine, nothing)
    taken = logits.gather(1, column).squeeze(1).masked_fill(~mine, 0)
    if head.smoothing:
        mean = logits.sum(1) / head.vocabulary
        taken = (1 - head.smoothing) * taken + head.smoothing * mean
    highest, at = logits.max(1)
    softmax = logits.softmax(1)
    log_sum = highest - softmax.gather(1, at.unsqueeze(1)).squeeze(1).log()
    share = softmax.gather(1, column).squeeze(1)
    return softmax, _Rows(highest, log_sum, taken, column, mine, share)


def _less_labels(softmax: Tensor, rows: _Rows, share: Tensor, head: Head) -> Tensor:
    """The gradient of the logits, in place; ``share``: the label's of the softmax, unrounded."""
    if not softmax.shape[1]:
        return softmax
    label = torch.where(rows.mine, share - (1 - head.smoothing), share)
    softmax.scatter_(1, rows.column, label.unsqueeze(1).to(softmax.dtype))
    return softmax.sub_(head.smoothing / head.vocabulary) if head.smoothing else softmax


def _transformed(tile: Tensor, head: Head) -> Tensor:
    """The logits of a tile, in float32 at least; in the tile itself where that has so many bits."""
    wide = tile.to(_wide(tile.dtype))
    if head.scale != 1.0:
        wide.mul_(head.scale)
    if head.cap is not None:
        wide.div_(head.cap).tanh_().mul_(head.cap)
    return wide


def _slope(logits: Tensor, head: Head) -> Tensor | None:
    """Of the logits by the product; None: they are it."""
    if head.cap is not None:
        return (1 - (logits / head.cap).square_()).mul_(head.scale)
    return None if head.scale == 1.0 else logits.new_tensor(head.scale)


def _times(gradient: Tensor, slope: Tensor | None) -> Tensor:
    return gradient if slope is None else gradient.mul_(slope)


def _over(head: Head, x: Tensor, op: str) -> Tensor:
    for axis in head.axes:
        x = transport.all_reduce(x, axis, op)
    return x


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows_at_once(logits: Tensor) -> int:
    """On a CPU as many as `TILE_BYTES` hold; elsewhere all, for each step is a launch."""
    rows, columns = logits.shape
    if logits.device.type != "cpu":
        return max(1, rows)
    return max(1, TILE_BYTES // max(1, columns * _wide(logits.dtype).itemsize))
