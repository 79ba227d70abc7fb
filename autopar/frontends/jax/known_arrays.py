"""Closed-over arrays whose numbers follow from their places, as the ops that make them.

A library makes positions and masks with numpy, and a loss has them as arrays: ``range(n)``, a
causal mask, a window. As ops they cost no memory, and attention's masks are read off them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.frontends.jax.draft import Builder, Operand, Uniform

LEAST = 8
"""Elements of an array that is looked at: a list of few indices is what it says."""
HIDDEN = -1e4
"""What scores get that do not count is a number below this."""

Band = tuple[int, int]
"""Of a row the first and the last column that it sees, less its own number."""


def made_of_places(array: NDArray[Any], builder: Builder) -> Operand | None:
    """The ops that make ``array``, number by number; None where its places do not say them."""
    if array.size < LEAST:
        return None
    if np.issubdtype(array.dtype, np.integer):
        return _counted(array, builder)
    masks = array.ndim >= 2 and set(array.shape[:-2]) <= {1} and min(array.shape[-2:]) > 1
    if not masks:
        return None
    shape, square = array.shape, array.reshape(array.shape[-2:])
    if array.dtype == np.bool_:
        return _seen(square, shape, builder)
    if str(array.dtype) not in ("float32", "float64"):
        return None
    first, low = float(array.flat[0]), float("nan")
    if first == 0 or first < HIDDEN:
        low = float(array.min())
    if not low < HIDDEN or not _is_choice(array, low):
        return None
    holds = _seen(square == 0, shape, builder)
    if holds is None:
        return None
    dtype = str(array.dtype)
    numbers = Uniform(0.0, dtype), Uniform(low, dtype)
    return builder.op("where", (holds, *numbers), shape, dtype)


def _is_choice(array: NDArray[Any], low: float) -> bool:
    """Between zero, which has no sign, and ``low``."""
    hidden = array == low
    return bool(((array == 0) | hidden).all()) and not np.signbit(array[~hidden]).any()


def _counted(array: NDArray[Any], builder: Builder) -> Operand | None:
    """Integers that count along one dim, and are the same along all others."""
    first = int(array.flat[0])
    steps = {}
    for dim, n in enumerate(array.shape):
        if n > 1:
            step = int(array[tuple(int(d == dim) for d in range(array.ndim))]) - first
            steps.update({dim: step} if step else {})
    if len(steps) != 1:
        return None
    ((dim, step),) = steps.items()
    n, dtype = array.shape[dim], str(array.dtype)
    stop = first + step * n
    bounds = np.iinfo(array.dtype)
    if not all(bounds.min <= end <= bounds.max for end in (first, stop)):
        return None
    spread = [n if d == dim else 1 for d in range(array.ndim)]
    line = np.arange(first, stop, step, dtype=array.dtype)
    if not np.array_equal(array, np.broadcast_to(line.reshape(spread), array.shape)):
        return None
    made = _line(first, n, step, dtype, builder)
    return builder.expand(builder.reshape(made, tuple(spread)), array.shape)


def _line(start: int, n: int, step: int, dtype: str, builder: Builder) -> Operand:
    stop = start + step * n
    return builder.op("arange", (), (n,), dtype, start=start, stop=stop, step=step, dtype=dtype)


def _seen(seen: NDArray[np.bool_], shape: tuple[int, ...], builder: Builder) -> Operand | None:
    """Columns that each row of ``seen`` [s, t] sees, as comparisons of places."""
    band = _band(seen)
    if band is None:
        return None
    s, t = seen.shape
    rows = builder.reshape(_line(0, s, 1, "int32", builder), (s, 1))
    columns = _line(0, t, 1, "int32", builder)
    tests: list[Operand] = []
    for kind, offset, open_at in (("le", band[1], t - 1), ("ge", band[0], 1 - s)):
        if (offset >= open_at) if kind == "le" else (offset <= open_at):
            continue
        ends = rows
        if offset:
            ends = builder.op("add", (rows, Uniform(offset, "int32")), (s, 1), "int32")
        turned = {"le": "ge", "ge": "le"}[kind]
        tests.append(builder.op(turned, (ends, columns), (s, t), "bool"))
    if not tests:
        return None
    holds = tests[0] if len(tests) == 1 else builder.op("and", tests, (s, t), "bool")
    return builder.reshape(holds, shape)


def _band(seen: NDArray[np.bool_]) -> Band | None:
    """Where each row sees a run of columns that moves on by one a row, and whatever lies outside
    of the array would go on so."""
    s, t = seen.shape
    counts, own = seen.sum(1), np.arange(s)
    some = counts > 0
    if not some.any():
        return None
    first, last = seen.argmax(1), t - 1 - seen[:, ::-1].argmax(1)
    begin, end = (first - own)[some & (first > 0)], (last - own)[some & (last < t - 1)]
    band = (int(begin[0]) if begin.size else 1 - s, int(end[0]) if end.size else t - 1)
    begins, ends = np.clip(own + band[0], 0, t), np.clip(own + band[1] + 1, 0, t)
    runs = np.maximum(ends - begins, 0)
    same = np.array_equal(counts, runs) and np.array_equal(
        np.where(some, first, 0), np.where(some, begins, 0)
    )
    return (
        band
        if same and np.array_equal(np.where(some, last + 1, 0), np.where(some, ends, 0))
        else None
    )
