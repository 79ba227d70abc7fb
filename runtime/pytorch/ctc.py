"""Connectionist temporal classification, sample by sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """The loss of every sample, not divided by its target's length.

    log_probs [t, n, c], targets [n, s] of integers, both lengths [n] -> [n]. Half-precision
    log-probabilities are computed with in float32. Without memory there are no lengths to read,
    and only the form is right.
    """
    if log_probs.dtype in (torch.float16, torch.bfloat16):
        log_probs = log_probs.float()
    if log_probs.is_meta:
        return log_probs.sum((0, 2))
    return F.ctc_loss(
        log_probs,
        targets,
        input_lengths,
        target_lengths,
        blank=blank,
        reduction="none",
        zero_infinity=zero_infinity,
    )
