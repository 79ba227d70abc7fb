"""What is asked of a cross-entropy, and how the pieces of a row's softmax make the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """z = softcap tanh(scale logits / softcap), or scale logits; with V columns and e = smoothing,
    loss = log sum exp z - (1 - e) z[label] - e / V sum z (Szegedy et al., arXiv:1512.00567).

    ignore_index:    rows of this label have loss and gradient 0.
    label_smoothing: e, in [0, 1).
    softcap:         0 for none (Gemma 2, arXiv:2408.00118, section 2).
    scale:           of logits, before the cap (Cohere's ``logit_scale``).
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    scale: float = 1.0

    @property
    def smooths(self) -> bool:
        return self.label_smoothing != 0.0


PLAIN = CrossEntropy()


class Statistics(NamedTuple):
    """Of each row, over some columns of the vocabulary; float32 [..., rows].

    Pieces of a vocabulary add up: the top is the largest of the tops, ``total`` is summed after
    multiplying each by exp(its top - the largest), ``target`` and ``summed`` are summed (`merged`).
    """

    top: Tensor
    """The largest z."""
    total: Tensor
    """sum exp(z - top)"""
    target: Tensor
    """z of the label; 0 where another piece has it."""
    summed: Tensor | None
    """sum z, where labels are smoothed."""


def empty_statistics(like: Tensor, shape: tuple[int, ...], summed: bool) -> Statistics:
    """Places to write them, on the device of ``like``."""
    count = 4 if summed else 3
    numbers = like.new_empty((count, *shape), dtype=torch.float32).unbind(0)
    return Statistics(numbers[0], numbers[1], numbers[2], numbers[3] if summed else None)


def merged(pieces: Statistics) -> Statistics:
    """Statistics [pieces, rows] of parts of the vocabulary -> [rows] of all of it."""
    top = pieces.top.amax(0)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    total = (pieces.total * (pieces.top - shift).exp()).sum(0)
    summed = None if pieces.summed is None else pieces.summed.sum(0)
    return Statistics(top, total, pieces.target.sum(0), summed)


def losses(
    statistics: Statistics, labels: Tensor, vocabulary: int, form: CrossEntropy = PLAIN
) -> tuple[Tensor, Tensor]:
    """(losses, log-sum-exp), float32 [rows] both, of statistics over all ``vocabulary`` columns."""
    log_sum_exp = statistics.top + statistics.total.log()
    loss = log_sum_exp - (1 - form.label_smoothing) * statistics.target
    if statistics.summed is not None:
        loss = loss - form.label_smoothing / vocabulary * statistics.summed
    return loss.masked_fill(labels == form.ignore_index, 0.0), log_sum_exp


def reference(logits: Tensor, labels: Tensor, form: CrossEntropy = PLAIN) -> Tensor:
    """Losses [rows] of logits [rows, V] in plain torch, at least in float32."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * form.scale
    if form.softcap:
        z = form.softcap * torch.tanh(z / form.softcap)
    return F.cross_entropy(
        z,
        labels,
        reduction="none",
        ignore_index=form.ignore_index,
        label_smoothing=form.label_smoothing,
    )
