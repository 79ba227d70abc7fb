"""Which part of what a forward returns is the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def find_loss(result: Any) -> torch.Tensor | None:
    """The tensor itself, ``["loss"]``, ``.loss``, or the only floating scalar of a tuple."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif (loss := getattr(result, "loss", None)) is None and isinstance(result, tuple | list):
        scalars = scalars_of(result)
        loss = result[scalars[0]] if len(scalars) == 1 else None
    return loss if isinstance(loss, torch.Tensor) else None


def scalars_of(result: tuple[Any, ...] | list[Any]) -> list[int]:
    """The places of a tuple where a floating scalar stands."""
    return [
        place
        for place, part in enumerate(result)
        if isinstance(part, torch.Tensor) and part.ndim == 0 and part.is_floating_point()
    ]
