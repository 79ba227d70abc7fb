"""``x.as_strided(size, stride)``: cuts and windows of a contiguous tensor, as ops that say so."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from autopar.frontends.pytorch.aten_elementwise import Arguments, Unliftable
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


def as_strided(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """Each dim of the result walks a dim of x by its own
    stride, or two of them do, windows ``step`` apart and the places in one."""
    x: Value = a["self"]
    given: Any = node.args[0]
    meta = given.meta["val"]
    if not meta.is_contiguous() or a["storage_offset"] not in (None, meta.storage_offset()):
        raise Unliftable
    sizes, strides = list(map(int, a["size"])), list(map(int, a["stride"]))
    long = [j for j, n in enumerate(sizes) if n != 1]
    x = _reshaped(lifter, x, tuple(n for n in x.shape if n != 1))
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
        if count < x.shape[dim]:
            shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
            cut = {"dim": dim, "start": 0, "stop": count, "step": 1}
            x = lifter.emit("slice", [x], shape, x.dtype, **cut)
    if place != len(long):
        raise Unliftable
    if order != sorted(order):
        turned = tuple(x.shape[d] for d in order)
        x = lifter.emit("transpose", [x], turned, x.dtype, dims=tuple(order))
    return _reshaped(lifter, x, tuple(sizes))


def _reshaped(lifter: Lifter, x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.shape == shape else lifter.emit("reshape", [x], shape, x.dtype, shape=shape)


def _unfolded(lifter: Lifter, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows of ``dim``, whose places become the last dim."""
    if size > x.shape[dim] or step < 1:
        raise Unliftable
    count = (x.shape[dim] - size) // step + 1
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :], size)
    call = {"target": "aten.unfold.default", "args": ["%0", dim, size, step], "kwargs": {}}
    return lifter.emit("aten::unfold", [x], shape, x.dtype, torch=call)
