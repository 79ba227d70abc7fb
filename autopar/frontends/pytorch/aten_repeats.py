"""`repeat_interleave`: every element of a dim as often as a number says, or as counts say.

Counts of the batch add up to a size that torch does not know; `sizes_asked` says what they must.
"""

from __future__ import annotations

import math

from autopar.frontends.pytorch.aten_call import Call, torch_call
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


def repeat_interleave(call: Call) -> Value:
    x, repeats, lifter = call.x, call["repeats"], call.lifter
    if call["dim"] is None:
        x = lifter.reshape(x, (math.prod(x.shape),))
    dim = (call["dim"] or 0) % len(x.shape)
    if isinstance(repeats, Value):
        return _by_counts(lifter, x, repeats, dim, call.made.shape[dim])
    before, after = x.shape[: dim + 1], x.shape[dim + 1 :]
    out = (*before[:-1], before[-1] * repeats, *after)
    if repeats == 1:
        return x
    if len(x.shape) == 4 and dim == 1:
        return lifter.emit("repeat_heads", [x], out, x.dtype, repeats=repeats)
    apart, spread = (*before, 1, *after), (*before, repeats, *after)
    each = lifter.emit("reshape", [x], apart, x.dtype, shape=apart)
    each = lifter.emit("expand", [each], spread, x.dtype, shape=spread)
    return lifter.reshape(each, out)


def _by_counts(lifter: Lifter, x: Value, counts: Value, dim: int, total: int) -> Value:
    """x [..., n, ...], counts [n] -> [..., total, ...]: for each place the first element whose
    running count is above it. Counts of one number are the same for all."""
    size = x.shape[dim]
    if math.prod(counts.shape) == 1 and size > 1:
        counts = lifter.expand(counts, (size,))
    ends = lifter.emit("cumsum", [counts], (size,), "int64", dim=0)
    search = torch_call("aten.searchsorted.Tensor", "%0", "%1", right=True)
    steps = lifter.arange(total)
    place = lifter.emit("aten::searchsorted", [ends, steps], (total,), "int64", torch=search)
    shape = (*x.shape[:dim], total, *x.shape[dim + 1 :])
    return lifter.emit("index_select", [x, place], shape, x.dtype, dim=dim)
