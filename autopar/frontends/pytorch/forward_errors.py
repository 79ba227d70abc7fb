"""What is wrong with a forward that fails, or that gives no loss, in words of its author."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.frontends.pytorch.build import is_internal, last_line
from autopar.frontends.pytorch.errors import (
    DataDependentError,
    ForwardError,
    LossError,
    UnsupportedOpError,
)
from autopar.frontends.shared.losses import find_loss, scalars_of
from autopar.frontends.shared.places import UNKNOWN, declared
from autopar.torch_private.modes import DataDependentOutputException, DynamicOutputShapeException

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
"""What torch raises where a tensor without values is asked for one."""


_NO_VALUES = (
    "data-dependent",
    "tracing tensor",
    "meta tensors",
    "data is not allocated yet",
    ".numpy() is not supported",
    "Pending unbacked symbols",
)
"""Words with which it raises something else there."""


def loss_of(result: Any) -> torch.Tensor:
    """The loss among what a forward returns. Raises `LossError`."""
    loss = find_loss(result)
    if loss is None:
        raise LossError(
            f"the forward returns {_shown(result)} without a loss: return the scalar loss, a tuple "
            "with no other scalar, or a record with .loss (Hugging Face models compute it when the "
            "batch has labels)"
        )
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise LossError(
            f"the forward returns a {str(loss.dtype).removeprefix('torch.')} tensor of shape "
            f"{list(loss.shape)}, not a scalar loss: reduce it, as in loss.mean()"
        )
    return loss


def _shown(result: Any) -> str:
    """``a dict (logits, hidden)``, ``a tuple with scalars at 1 and 2``"""
    kind = f"a {type(result).__name__}"
    if isinstance(result, dict):
        return f"{kind} ({', '.join(map(str, result))})"
    if not isinstance(result, tuple | list):
        return f"{kind} (no .loss)"
    places = " and ".join(map(str, scalars_of(result)))
    return f"{kind} with {f'scalars at {places}' if places else 'no scalar'}"


def explained(error: Exception, model: nn.Module, path: str, differing: str = "") -> Exception:
    """``error`` of the user's forward as a named error that points at the user's line.

    path: the module whose forward failed; ``differing``: what of the batch it asked for that is
        not the same in every sample, in words.
    """
    place = last_line(error)
    # no line of the user's ran: a call that the forward does not take, or torch's
    if place == UNKNOWN:
        place = _declared(type(model))
    if path:
        place += f" (module {path})"
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, NEEDS_VALUES) or any(words in text for words in _NO_VALUES):
        return DataDependentError(
            f"{place} needs the value of a tensor while the model is captured ({text}). The "
            "program must be the same for every batch: replace .item(), bool(tensor), int(tensor) "
            "and boolean indexing by torch.where, masks or fixed shapes; sizes may come from an "
            f"entry of the batch that has the same few integers in every sample{differing}"
        )
    if "HigherOrder" in type(error).__name__:
        return UnsupportedOpError(
            f"{place} uses a higher-order op (torch.cond, a while loop, a map), which is not "
            "supported in a forward: compute both sides and choose with torch.where"
        )
    return ForwardError(f"the forward failed at {place}: {type(error).__name__}: {text}")


def _declared(model: type[nn.Module]) -> str:
    """``file:line`` of the forward of a class, or of the class where it has none of its own."""
    for owner in (model.forward, model):
        place = declared(owner, is_internal)
        if place != UNKNOWN:
            return place
    return model.__name__
