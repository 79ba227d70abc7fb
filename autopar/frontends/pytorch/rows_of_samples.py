"""Rows that a mask chooses, as so many of each sample: ``x[mask].view(batch, -1, width)``, and
``x[mask] + features`` of as many rows.

Masked autoencoders run the visible patches of every sample so, classifiers take the last of them,
and what a model sees of images is added to the tokens that stand for it.
How many there are is a size of all that follows, so it is that of the workload's own batch, whose
mask is computed while the forward is traced. The choice is then a gather in each sample, by places
that the program finds in the mask again (`row_places`), which counts them at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.frontends.pytorch.constant_indices import ChooseRows, taken
from autopar.frontends.pytorch.constant_values import (
    BatchValues,
    constant_of,
    is_written,
    node_of,
    written_by,
)
from autopar.frontends.pytorch.errors import MutationError
from autopar.frontends.pytorch.recording import last_node
from autopar.torch_private.modes import without_modes, without_torch_function
from autopar.torch_private.tensors import memory_of

_PAIRED = frozenset("add __add__ __radd__ sub __sub__ mul __mul__ __rmul__ div __truediv__".split())
"""Functions of rows and others; none that writes into rows, which what holds them would miss."""
_COPIES = frozenset(("clone", "contiguous"))

torch.library.define("autopar::row_places", "(Tensor mask, int count) -> Tensor")


@torch.library.register_fake("autopar::row_places")  # type: ignore[untyped-decorator]
def _form(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty((mask.shape[0], count), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class RowsOfSamples:
    """Stands for ``rows.view(batch, -1, ...)`` of rows that a mask [batch, ...] has chosen of x;
    ``rows``: their place in the trace."""

    rows: fx.Node | None = field(default=None, compare=False)

    @property
    def __name__(self) -> str:
        return "rows_of_samples"

    def __call__(self, x: Tensor, mask: Tensor, count: int, shape: Sequence[int]) -> Tensor:
        samples, wide = mask.shape[0], math.prod(mask.shape[1:])
        width = math.prod(x.shape[mask.dim() :])
        places = torch.ops.autopar.row_places(mask.reshape(samples, wide), count)
        return taken(x.reshape(samples, wide, width), places).reshape(tuple(shape))


@dataclass(frozen=True, slots=True)
class BesideRows:
    """Stands for a function of rows that a mask has chosen of x, at ``place`` of its two operands,
    and of as many others."""

    func: Callable[[Tensor, Tensor], Tensor]
    place: int

    @property
    def __name__(self) -> str:
        return self.func.__name__

    def __call__(self, x: Tensor, mask: Tensor, count: int, other: Tensor) -> Tensor:
        rows = RowsOfSamples()(x, mask, count, (mask.shape[0] * count, *x.shape[mask.dim() :]))
        return self.func(other, rows) if self.place else self.func(rows, other)


class ChosenRows:
    """Rows that masks chose in one trace, by the rows."""

    def __init__(self, batch: Callable[[], BatchValues]) -> None:
        self._batch = cache(batch)
        self._of: Any = WeakTensorKeyDictionary()
        self._masks: Any = WeakTensorKeyDictionary()
        self._views: list[tuple[fx.Node | None, fx.Node | None]] = []

    def note(self, func: Any, args: Sequence[Any], rows: Any) -> None:
        """Keeps what ``rows`` were chosen of, where ``func`` has chosen by a mask of several dims
        whose samples may bring any number."""
        if func.__name__ in _COPIES and len(args) == 1 and (made := self._made_of(args[0])):
            self._of[rows] = *made, last_node()
        if isinstance(func, RowsOfSamples):
            self._views.append((node_of(rows), func.rows))
        if not isinstance(func, ChooseRows) or args[1].dim() < 2:
            return
        mask = args[1]
        if isinstance(rows.shape[0], torch.SymInt):
            self._masks[mask] = True
        if mask in self._masks:  # whose rows torch may have counted since, by what met them
            self._of[rows] = *args, last_node()

    def by_samples(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[Any, ...] | None:
        """What stands for a view of rows that a mask has chosen, or for their sum with others,
        behind it its arguments; None where the call is none, or the samples of the batch have not
        all as many."""
        if func.__name__ in _PAIRED and len(args) == 2 and not kwargs:
            return self._beside(func, *args)
        if func.__name__ not in ("view", "reshape") or kwargs:
            return None
        if (made := self._made_of(args[0])) is None:
            return None
        x, mask = made
        asked = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
        if len(asked) < 2 or asked[0] != mask.shape[0] or any(type(n) is not int for n in asked):
            return None
        if (count := self._count(mask)) is None:
            return None
        held = mask.shape[0] * count * math.prod(x.shape[mask.dim() :])
        shape = _whole(asked, held)
        if shape is None:
            return None
        return RowsOfSamples(node_of(args[0])), x, mask, count, shape

    def check(self) -> None:
        """Raises `MutationError` where a view of rows, which is none here, is written, and the rows
        are read."""
        for view, rows in self._views:
            if view is not None and rows is not None and rows.users and is_written(view):
                raise MutationError(
                    "a view of rows that a mask has chosen, as in x[mask].view(batch, -1, width), "
                    "is written, and the rows are read beside it: write y = y * 2 for y *= 2"
                )

    def _beside(self, func: Any, *operands: Any) -> tuple[Any, ...] | None:
        for place in (0, 1):
            other = operands[1 - place]
            made = self._made_of(operands[place])
            if made is None or not isinstance(other, Tensor) or other.dim() == 0:
                continue
            x, mask = made
            if not isinstance(other.shape[0], int) or other.shape[1:] != x.shape[mask.dim() :]:
                continue
            count = self._count(mask)
            if count is not None and mask.shape[0] * count == other.shape[0]:
                return (BesideRows(func, place), x, mask, count, other)
        return None

    def _made_of(self, rows: Any) -> tuple[Tensor, Tensor] | None:
        """The tensor and the mask that ``rows`` were chosen of and by; None where either may have
        been written since."""
        if not isinstance(rows, Tensor) or rows not in self._of:
            return None
        x, mask, behind = self._of[rows]
        return None if _written_since(behind, (x, rows)) else (x, mask)

    def _count(self, mask: Tensor) -> int | None:
        """How many places of each sample the mask of the workload's batch has."""
        known = constant_of(mask, self._batch())
        if known is None:
            return None
        with without_modes(), without_torch_function():
            counts: list[int] = known.flatten(1).sum(1).tolist()
        return counts[0] if len(set(counts)) == 1 and counts[0] else None


def _written_since(behind: fx.Node | None, tensors: Sequence[Tensor]) -> bool:
    """Whether an op behind that one may have written into these: a layer that repeats may."""
    memories = {memory_of(t) for t in tensors}
    node: fx.Node | None = last_node()
    while node is not None and node is not behind and node.op != "root":
        if node.target is torch.ops.autopar.enter.default:
            return True
        written = (n.meta.get("val") for n in written_by(node))
        if any(isinstance(t, Tensor) and memory_of(t) in memories for t in written):
            return True
        node = node.prev
    return False


def _whole(asked: Sequence[int], held: int) -> list[int] | None:
    """The shape of ``held`` numbers that is asked for, its -1 as a number; None if it is none."""
    left = math.prod(n for n in asked if n != -1)
    open_dims = list(asked).count(-1)
    if left <= 0 or held % left or open_dims > 1 or (not open_dims and left != held):
        return None
    return [held // left if n == -1 else n for n in asked]
