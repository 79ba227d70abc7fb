"""The losses of a chunk's logits and their gradient by our kernels: two passes that read them, one
that writes, and no copy in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autopar.runtime.pytorch.kernels.chunk_loss import gradient, statistics
from autopar.runtime.pytorch.kernels.cross_entropy import CrossEntropy

Joined = Callable[[Tensor, str], Tensor]
"""Of a tensor and ``max`` or ``sum``: over the ranks that split the vocabulary."""


def losses_by_kernel(
    logits: Tensor,
    labels: Tensor,
    form: CrossEntropy,
    first: int,
    vocabulary: int,
    trains: bool,
    over: Joined | None = None,
) -> Tensor:
    """Losses [rows], float32, of logits [rows, columns]; where it trains, the gradient of each
    row's loss takes the logits' place. Rows to ignore have no gradient, and any loss.

    first: column of the whole ``vocabulary`` with which these begin.
    over:  joins what the ranks that have the others make; None: these are all.
    """
    numbers = statistics(logits, labels, first, form)
    taken = (1 - form.label_smoothing) * numbers.target
    if numbers.summed is not None:
        taken = taken + form.label_smoothing / vocabulary * numbers.summed
    top, total = numbers.top, numbers.total
    if over is not None:
        top = over(numbers.top, "max")
        total, taken = over(torch.stack([total * (numbers.top - top).exp(), taken]), "sum")
    log_sum = total.log() + top
    if trains:
        gradient(logits, labels, first, log_sum, form, vocabulary=vocabulary, out=logits)
    return log_sum - taken
