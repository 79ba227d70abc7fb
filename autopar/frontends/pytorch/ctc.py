"""The loss of connectionist temporal classification (`F.ctc_loss`, `nn.CTCLoss`) as one op.

PyTorch reads the lengths of inputs and targets as numbers, which a tensor without values does not
have. While a model is traced, our own function stands in the place of ``torch.ctc_loss``. It writes
``autopar::ctc_loss`` into the trace, the loss of every sample by itself, and then what PyTorch
makes of those, so that a reduction is split over the samples like any other.

Targets that stand one behind another may be those that a mask has chosen: see `ctc_targets`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.frontends.pytorch.build import is_internal
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.shared.places import caller

Lengths = Tensor | Sequence[int]
_NONE, _MEAN, _SUM = 0, 1, 2  # of torch.nn._reduction
BEHIND = (
    "has targets in one dim, one sample behind another, which no rank can take its own samples of: "
    "give them as [samples, longest target], filled up with any class behind each one's "
    "target_lengths, or choose them by a mask of that shape whose .sum(-1) the lengths are"
)

torch.library.define(
    "autopar::ctc_loss",
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity) -> Tensor",
)


@torch.library.register_fake("autopar::ctc_loss")  # type: ignore[untyped-decorator]
def _form(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _no_backward(context: Any, gradient: Tensor) -> Any:
    raise AssertionError("traces end before a backward")


torch.library.register_autograd("autopar::ctc_loss", _no_backward)


@contextmanager
def kept_ctc_losses() -> Iterator[None]:
    """Inside, ``torch.ctc_loss`` writes into the trace. It raises `UnsupportedOpError` for targets
    that stand one behind another, unless a mask has chosen them, and for a single sequence without
    a dim of samples."""
    plain = torch.ctc_loss
    torch.ctc_loss = _ctc_loss
    try:
        yield
    finally:
        torch.ctc_loss = plain


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """``torch.ctc_loss`` of batches, in float32 at least, as PyTorch computes it under autocast."""
    chosen = targets.dim() == 1 and isinstance(targets.shape[0], torch.SymInt)
    if log_probs.dim() != 3 or not (chosen or targets.dim() == 2):
        raise UnsupportedOpError(f"{_place()}: F.ctc_loss {_refused(log_probs, targets)}")
    if log_probs.dtype in (torch.float16, torch.bfloat16):
        log_probs = log_probs.float()
    given, wanted = (
        _as_tensor(lengths, log_probs.shape[1], name)
        for lengths, name in ((input_lengths, "input"), (target_lengths, "target"))
    )
    each: Tensor = torch.ops.autopar.ctc_loss(
        log_probs, targets, given, wanted, blank, zero_infinity
    )
    if reduction == _MEAN:
        return (each / wanted.clamp(min=1)).mean()
    return each.sum() if reduction == _SUM else each


def _as_tensor(lengths: Lengths, samples: int, name: str) -> Tensor:
    """Numbers as a tensor; where they are all one, of any number of samples."""
    if isinstance(lengths, Tensor):
        count = lengths.shape[0] if lengths.dim() == 1 else None
        if count == samples:
            return lengths
    else:
        count = len(lengths)
        if count == samples and len(set(lengths)) == 1:
            return torch.full((samples,), lengths[0], dtype=torch.int64)
        if count == samples:
            return torch.tensor(list(lengths), dtype=torch.int64)
    raise UnsupportedOpError(
        f"{_place()}: F.ctc_loss has {samples} samples, and {name}_lengths "
        f"{'of another shape' if count is None else f'{count} of them'}: give one length a sample"
    )


def _refused(log_probs: Tensor, targets: Tensor) -> str:
    if targets.dim() == 1 and log_probs.dim() == 3:
        return BEHIND
    return (
        f"has log_probs of {log_probs.dim()} and targets of {targets.dim()} dims: give them as "
        "[times, samples, classes] and [samples, longest target]; of one sequence as "
        "log_probs.unsqueeze(1) and targets.unsqueeze(0), with lengths of shape [1]"
    )


def _place() -> str:
    """The user's line, as ``model.py:12``."""
    return caller(sys._getframe(1), is_internal)
