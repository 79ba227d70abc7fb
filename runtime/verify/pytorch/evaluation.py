"""What a model evaluates to on one device, for `Trainer.evaluate` to be held against.

A program evaluates what was captured of the model in training: without gradients, with nothing
dropped, and batch norms by their running statistics. That is what ``.eval()`` means to modules of
torch; a model that asks for ``self.training`` by itself may have something else there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.frontends.shared.losses import find_loss
from autopar.runtime.pytorch.recording import named_tensors
from autopar.runtime.verify.pytorch.dropping import nothing_dropped
from autopar.runtime.verify.pytorch.modes import Evaluated, exact
from autopar.runtime.verify.verified import SMALLEST, TOLERANCE


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``branches``: in ``.eval()`` the model has another loss, or none."""

    loss: float
    branches: bool


def evaluation(model: nn.Module, batch: Mapping[str, Any]) -> Evaluation | None:
    """None where the loss is no number. A forward may write buffers, in ``.eval()`` too: nothing
    else is to be read off ``model`` behind this."""
    before = [(name, t, t.clone()) for name, t in named_tensors(model) if not t.requires_grad]
    model.eval()
    own = _loss(model, batch, exact())
    model.train()
    for name, tensor, value in before:
        tensor.copy_(value)
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        if not isinstance(getattr(owner, attribute, None), nn.Parameter):
            setattr(owner, attribute, tensor)  # the forward may have put another in its place
    with nothing_dropped():
        planned = _loss(model, batch, exact(Evaluated))
    if not math.isfinite(planned):
        return None
    near = abs(own - planned) <= TOLERANCE * max(abs(planned), SMALLEST)
    return Evaluation(planned, not near)


def _loss(model: nn.Module, batch: Mapping[str, Any], quiet: AbstractContextManager[None]) -> float:
    """Not a number where the model fails, or gives no loss."""
    try:
        with torch.no_grad(), quiet:
            loss = find_loss(model(**batch))
    except Exception:  # a user's function, which may well want no labels in .eval()
        return math.nan
    return math.nan if loss is None or loss.numel() != 1 else float(loss)
