"""`repeat_interleave`: every element of a dim as often as a number says, or as counts say.

Counts of the batch add up to a size that torch does not know; `sizes_asked` says what they must.
"""

from __future__ import annotations

import math

from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


def repeat_interleave(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, repeats = a["self"], a["repeats"]
    if a["dim"] is None:
        x = _reshaped(lifter, x, (math.prod(x.shape),))
    dim = (a["dim"] or 0) % len(x.shape)
    if isinstance(repeats, Value):
        return _by_counts(lifter, x, repeats, dim, ir.like(node.meta["val"]).shape[dim])
    out = (*x.shape[:dim], x.shape[dim] * repeats, *x.shape[dim + 1 :])
    if repeats == 1:
        return x  # type: ignore[no-any-return]
    if len(x.shape) == 4 and dim == 1:
        return lifter.emit("repeat_heads", [x], out, x.dtype, repeats=repeats)
    apart = (*x.shape[: dim + 1], 1, *x.shape[dim + 1 :])
    spread = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
    each = lifter.emit("reshape", [x], apart, x.dtype, shape=apart)
    each = lifter.emit("expand", [each], spread, x.dtype, shape=spread)
    return _reshaped(lifter, each, out)


def _by_counts(lifter: Lifter, x: Value, counts: Value, dim: int, total: int) -> Value:
    """x [..., n, ...], counts [n] -> [..., total, ...]: for each place the first element whose
    running count is above it. Counts of one number are the same for all."""
    size = x.shape[dim]
    if math.prod(counts.shape) == 1 and size > 1:
        counts = lifter.emit("expand", [counts], (size,), counts.dtype, shape=(size,))
    ends = lifter.emit("cumsum", [counts], (size,), "int64", dim=0)
    steps = lifter.emit("arange", [], (total,), "int64", start=0, stop=total, step=1, dtype="int64")
    call = {"target": "aten.searchsorted.Tensor", "args": ["%0", "%1"], "kwargs": {"right": True}}
    place = lifter.emit("aten::searchsorted", [ends, steps], (total,), "int64", torch=call)
    shape = (*x.shape[:dim], total, *x.shape[dim + 1 :])
    return lifter.emit("index_select", [x, place], shape, x.dtype, dim=dim)


def _reshaped(lifter: Lifter, x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.shape == shape else lifter.emit("reshape", [x], shape, x.dtype, shape=shape)
