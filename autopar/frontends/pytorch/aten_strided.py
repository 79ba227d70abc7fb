"""``x.as_strided(size, stride)``: cuts and windows of a contiguous tensor, as ops that say so."""

from __future__ import annotations

import math
from typing import Any

from autopar.frontends.pytorch.aten_call import Call, Unliftable, torch_call
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


def as_strided(call: Call) -> Value:
    """Each dim of the result walks a dim of x by its own
    stride, or two of them do, windows ``step`` apart and the places in one."""
    lifter = call.lifter
    given: Any = call.node.args[0]
    meta = given.meta["val"]
    if not meta.is_contiguous() or call["storage_offset"] not in (None, meta.storage_offset()):
        raise Unliftable
    sizes, strides = list(map(int, call["size"])), list(map(int, call["stride"]))
    long = [j for j, n in enumerate(sizes) if n != 1]
    x = lifter.reshape(call.x, tuple(n for n in call.x.shape if n != 1))
    steps = [math.prod(x.shape[i + 1 :]) for i in range(len(x.shape))]
    order: list[int] = []  # dims of x as it becomes, in the order of the result
    windows = len(x.shape)
    place = 0
    for dim, step in enumerate(steps):
        if place == len(long):
            raise Unliftable
        j = long[place]
        count, apart = sizes[j], strides[j]
        inner = long[place + 1] if place + 1 < len(long) else None
        if inner is not None and strides[inner] == step and apart % step == 0:
            x = _unfolded(lifter, x, dim, sizes[inner], apart // step)
            order += [dim, windows]
            windows, place = windows + 1, place + 2
        elif apart == step:
            order.append(dim)
            place += 1
        else:
            raise Unliftable
        if count > x.shape[dim]:
            raise Unliftable
        x = lifter.slice(x, dim, 0, count)
    if place != len(long):
        raise Unliftable
    return lifter.reshape(lifter.transpose(x, tuple(order)), tuple(sizes))


def _unfolded(lifter: Lifter, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows of ``dim``, whose places become the last dim."""
    if size > x.shape[dim] or step < 1:
        raise Unliftable
    count = (x.shape[dim] - size) // step + 1
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :], size)
    unfold = torch_call("aten.unfold.default", "%0", dim, size, step)
    return lifter.emit("aten::unfold", [x], shape, x.dtype, torch=unfold)
