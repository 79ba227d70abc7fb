"""Figures that may be numbers, or arrays of one length: a price under as many sets of constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Number: TypeAlias = float
"""A float, or an array of them, with which all is done as with a float."""


def larger_of(*like: Number) -> Callable[[Number, Number], Number]:
    """What gives the larger of two such figures, entry by entry."""
    longer: Any = np.maximum
    return longer if np.ndarray in map(type, like) else max


def larger(one: Number, other: Number) -> Number:
    """The larger of two, entry by entry."""
    return larger_of(one, other)(one, other)


def largest(values: Iterable[Number]) -> Number:
    """The largest of some, entry by entry; 0 of none."""
    first, *others = [*values] or [0.0]
    for value in others:
        first = larger(first, value)
    return first


def table(rows: Sequence[Sequence[Number]]) -> NDArray[np.float64]:
    """[figures, stages, columns] of [stages][figures]."""
    values: list[Any] = [value for row in rows for value in row]
    several = [value for value in values if isinstance(value, np.ndarray)]
    if not several:
        return np.array(rows, dtype=np.float64).T[..., None]
    columns = max(value.size for value in several)
    whole = [[np.broadcast_to(value, columns) for value in row] for row in rows]
    return np.swapaxes(np.array(whole, dtype=np.float64), 0, 1)


def plain(values: NDArray[np.float64]) -> Number:
    """Of one column its number, of several all of them."""
    several: Any = values
    return float(values[0]) if len(values) == 1 else several
