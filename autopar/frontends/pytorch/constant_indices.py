"""Pieces by constants: ``similarity[~eye].view(n, -1)``, ``mask[i]`` with i of `arange`.

How many rows a constant mask chooses does not depend on the batch, so they are counted while the
forward is traced. The choice is then a gather, in every row where each row chooses as many, by
places that the program finds in the mask again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.frontends.pytorch.constant_values import constant_of
from autopar.torch_private.modes import without_modes


@dataclass(frozen=True, slots=True)
class ChooseRows:
    """Stands for ``x[mask]`` or `torch.masked_select` in a trace; ``plainly`` is which."""

    plainly: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def __name__(self) -> str:
        return "choose_rows"

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        known = constant_of(mask)
        if known is None:
            return self.plainly(x, mask)
        with without_modes():
            wide = math.prod(mask.shape[1:])
            counts: list[int] = known.reshape(mask.shape[0], wide).sum(1).tolist()
        return _gathered(x, mask, counts)


class TakePiece:
    """Stands for ``x[i]`` in a trace, where torch asks each i without dims for its value."""

    __name__ = "take_piece"

    def __call__(self, x: torch.Tensor, index: Any) -> torch.Tensor:
        if isinstance(index, tuple):
            return x[tuple(map(_as_number, index))]
        return x[_as_number(index)]


TAKE_PIECE = TakePiece()


def by_constant(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """What stands for a call of torch that may take a piece by constants, and its arguments."""
    choice = _chosen_by(func, args, kwargs)
    if choice is not None:
        return ChooseRows(func), choice
    if func.__name__ == "__getitem__" and isinstance(args[0], torch.Tensor):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(map(_is_number, index)):
            return TAKE_PIECE, args
    return None


def _is_all(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _is_number(index: Any) -> bool:
    plain = isinstance(index, torch.Tensor) and index.dim() == 0
    return plain and not index.dtype.is_floating_point and index.dtype is not torch.bool


def _as_number(index: Any) -> Any:
    known = constant_of(index) if _is_number(index) else None
    if known is None:
        return index
    with without_modes():
        return int(known.item())


def _chosen_by(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``x`` and the mask that a call of torch chooses its rows by."""
    if len(args) != 2 or kwargs or func.__name__ not in ("__getitem__", "masked_select"):
        return None
    x, mask = args
    if isinstance(mask, tuple) and mask and all(map(_is_all, mask[1:])):
        mask = mask[0]
    if not isinstance(x, torch.Tensor) or not isinstance(mask, torch.Tensor):
        return None
    known = all(isinstance(n, int) for n in (*x.shape, *mask.shape))
    if mask.dtype is not torch.bool or not known or mask.dim() == 0:
        return None
    if mask.shape != x.shape[: mask.dim()]:
        return None
    whole = func.__name__ == "__getitem__" or mask.shape == x.shape
    return (x, mask) if whole else None


def _gathered(x: torch.Tensor, mask: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """x [*mask.shape, *rest] -> [chosen, *rest]; ``counts`` of them in each row of the mask."""
    rest = x.shape[mask.dim() :]
    alike = mask.dim() > 1 and len(set(counts)) == 1
    rows, count = (len(counts), counts[0]) if alike else (1, sum(counts))
    wide = mask.reshape(rows, -1)
    places = wide.to(torch.int64).argsort(dim=1, descending=True, stable=True)[:, :count]
    x = x.reshape(rows, wide.shape[1], math.prod(rest))
    return taken(x, places).reshape(rows * count, *rest)


def taken(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [rows, n, width], places [rows, count] -> [rows, count, width]."""
    return x.gather(1, places.unsqueeze(-1).expand(*places.shape, x.shape[2]))
