"""Rows that a mask chooses, as so many of each sample: ``x[mask].view(batch, -1, width)``.

Masked autoencoders run the visible patches of every sample so, classifiers take the last of them.
How many there are is a size of all that follows, so it is that of the workload's own batch, whose
mask is computed while the forward is traced. The choice is then a gather in each sample, by places
that the program finds in the mask again (`row_places`), which counts them at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.frontends.pytorch.constant_indices import ChooseRows, taken
from autopar.frontends.pytorch.constant_values import BatchValues, constant_of
from autopar.torch_private.modes import without_modes, without_torch_function

torch.library.define("autopar::row_places", "(Tensor mask, int count) -> Tensor")


@torch.library.register_fake("autopar::row_places")  # type: ignore[untyped-decorator]
def _form(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty((mask.shape[0], count), dtype=torch.int64)


class RowsOfSamples:
    """Stands for ``rows.view(batch, -1, ...)`` of rows that a mask [batch, ...] has chosen of x."""

    __name__ = "rows_of_samples"

    def __call__(self, x: Tensor, mask: Tensor, count: int, shape: Sequence[int]) -> Tensor:
        samples, wide = mask.shape[0], math.prod(mask.shape[1:])
        width = math.prod(x.shape[mask.dim() :])
        places = torch.ops.autopar.row_places(mask.reshape(samples, wide), count)
        return taken(x.reshape(samples, wide, width), places).reshape(tuple(shape))


class ChosenRows:
    """Rows that masks chose in one trace, by the rows."""

    def __init__(self, batch: Callable[[], BatchValues]) -> None:
        self._batch = cache(batch)
        self._of: Any = WeakTensorKeyDictionary()

    def note(self, func: Any, args: Sequence[Any], rows: Any) -> None:
        """Keeps what ``rows`` were chosen of, where ``func`` has chosen by a mask of several dims
        whose samples may bring any number."""
        if not isinstance(func, ChooseRows) or args[1].dim() < 2:
            return
        if isinstance(rows.shape[0], torch.SymInt):
            self._of[rows] = tuple(args)

    def by_samples(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[Any, ...] | None:
        """What stands for a view of rows that a mask has chosen, behind it its arguments; None
        where the call is none, or the samples of the batch have not all as many."""
        if func.__name__ not in ("view", "reshape") or kwargs or args[0] not in self._of:
            return None
        x, mask = self._of[args[0]]
        asked = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
        if len(asked) < 2 or asked[0] != mask.shape[0] or any(type(n) is not int for n in asked):
            return None
        if (count := self._count(mask)) is None:
            return None
        held = mask.shape[0] * count * math.prod(x.shape[mask.dim() :])
        shape = _whole(asked, held)
        return None if shape is None else (ROWS_OF_SAMPLES, x, mask, count, shape)

    def _count(self, mask: Tensor) -> int | None:
        """How many places of each sample the mask of the workload's batch has."""
        known = constant_of(mask, self._batch())
        if known is None:
            return None
        with without_modes(), without_torch_function():
            counts: list[int] = known.flatten(1).sum(1).tolist()
        return counts[0] if len(set(counts)) == 1 and counts[0] else None


ROWS_OF_SAMPLES = RowsOfSamples()


def _whole(asked: Sequence[int], held: int) -> list[int] | None:
    """The shape of ``held`` numbers that is asked for, its -1 as a number; None if it is none."""
    left = math.prod(n for n in asked if n != -1)
    open_dims = list(asked).count(-1)
    if left <= 0 or held % left or open_dims > 1 or (not open_dims and left != held):
        return None
    return [held // left if n == -1 else n for n in asked]
