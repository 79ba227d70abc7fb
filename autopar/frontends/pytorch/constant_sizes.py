"""Sizes by constants: ``x.repeat_interleave(counts)``, ``F.interpolate(x, (h, w))``, ``x[:n]``.

What a forward makes from constants alone has values while it is traced, so what it repeats, pads or
enlarges by them has sizes: numbers in the place of tensors without dims, places in that of counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.frontends.pytorch.forward_errors import NEEDS_VALUES
from autopar.frontends.pytorch.same_numbers import known_of
from autopar.torch_private.modes import without_modes

_OPEN = frozenset({"unique_consecutive", "unique", "nonzero", "argwhere"})
"""Functions whose result is as large as values of its operand say."""
_SIZED = frozenset(
    ("arange", "zeros", "ones", "full", "empty", "linspace", "eye", "view", "reshape", "expand",
     "repeat", "new_zeros", "new_ones", "new_empty", "narrow", "unflatten", "tile", "chunk")
)  # fmt: skip
"""Functions that take sizes one by one."""


@dataclass(frozen=True, slots=True)
class OfConstants:
    """Stands for a function of constants: its result is one."""

    plainly: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return self.plainly.__name__

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        known = known_of(x)
        if known is None:
            return self.plainly(x, *args, **kwargs)
        with without_modes():
            result = self.plainly(known, *args, **kwargs)
        return tuple(map(_written, result)) if isinstance(result, tuple) else _written(result)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Stands for ``x.repeat_interleave(counts, dim)`` with counts that are constants."""

    plainly: Callable[..., torch.Tensor]

    @property
    def __name__(self) -> str:
        return "repeat_interleave"

    def __call__(self, x: torch.Tensor, counts: torch.Tensor, dim: int | None) -> torch.Tensor:
        known = known_of(counts)
        if known is None:
            return self.plainly(x, counts, dim)
        x, dim = (x.flatten(), 0) if dim is None else (x, dim)
        with without_modes():
            places = torch.arange(x.shape[dim]).repeat_interleave(known)
        return x.index_select(dim, _written(places))


@dataclass(frozen=True, slots=True)
class BySizes:
    """Stands for a function that is given sizes as tensors without dims, which it asks."""

    plainly: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return self.plainly.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.plainly(*args, **kwargs)
        except NEEDS_VALUES:
            numbers = _as_numbers(args), {name: _as_numbers(v) for name, v in kwargs.items()}
            return self.plainly(*numbers[0], **numbers[1])


def sized_by_constants(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Any, Any, Any] | None:
    """What stands for a call of torch that may get its sizes from constants, and its arguments."""
    name, given = func.__name__, kwargs or {}
    if name in _OPEN and args and isinstance(args[0], torch.Tensor):
        return OfConstants(func), args, given
    if name == "repeat_interleave":
        return _repeated(func, args, given)
    sized = any(map(_has_sizes, (*args, *given.values())))
    if sized or (name in _SIZED and any(map(_is_size, args))):
        return BySizes(func), args, given
    return None


def _repeated(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any] | None:
    given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | dict(kwargs)
    x, counts = given.pop("input", given.pop("self", None)), given.pop("repeats", None)
    if given.keys() - {"dim"} or not isinstance(x, torch.Tensor):
        return None
    if counts is None:
        return OfConstants(func), (x,), {}
    if not isinstance(counts, torch.Tensor) or counts.dim() != 1 or counts.numel() == 1:
        return None
    return Repeated(func), (x, counts, given.get("dim")), {}


def _has_sizes(value: object) -> bool:
    """Whether this is a shape, or an index with slices, that has tensors for numbers."""
    if isinstance(value, slice):
        return any(map(_is_size, (value.start, value.stop, value.step)))
    return isinstance(value, list | tuple) and any(_is_size(v) or _has_sizes(v) for v in value)


def _is_size(value: object) -> bool:
    plain = isinstance(value, torch.Tensor) and value.dim() == 0
    return plain and value.dtype in (torch.int64, torch.int32)  # type: ignore[attr-defined]


def _as_numbers(value: Any) -> Any:
    """``value`` with numbers in the place of constants without dims."""
    if type(value) in (list, tuple):
        return type(value)(map(_as_numbers, value))
    if isinstance(value, slice):
        return slice(*map(_as_numbers, (value.start, value.stop, value.step)))
    known = known_of(value) if _is_size(value) else None
    if known is None:
        return value
    with without_modes():
        return int(known.item())


def _written(known: torch.Tensor) -> torch.Tensor:
    """A tensor of the trace with these values."""
    with without_modes():
        values, dtype, device = known.tolist(), known.dtype, known.device
    made = torch.tensor(values, dtype=dtype, device=device)
    return made if made.shape == known.shape else made.reshape(known.shape)  # of no values
