"""Aten ops that move elements around or make tensors from nothing, as op kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments, Lift, Unliftable
from autopar.frontends.pytorch.aten_repeats import repeat_interleave
from autopar.frontends.pytorch.aten_strided import as_strided
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.torch_private.modes import without_modes


def reshape_to(lifter: Lifter, x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.shape == shape else lifter.emit("reshape", [x], shape, x.dtype, shape=shape)


def _reshape(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = next(iter(a.values()))
    meta = ir.like(node.meta["val"])
    if meta.dtype != x.dtype:  # view(dtype): the same bytes under another name
        raise Unliftable
    return reshape_to(lifter, x, meta.shape)


def transpose_to(lifter: Lifter, x: Value, dims: tuple[int, ...]) -> Value:
    if dims == tuple(range(len(dims))):
        return x
    return lifter.emit("transpose", [x], tuple(x.shape[d] for d in dims), x.dtype, dims=dims)


def _permute(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    rank = len(x.shape)
    return transpose_to(lifter, x, tuple(d % rank for d in a["dims"]))


def _swap(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    rank = len(x.shape)
    if rank < 2:
        return x
    names = ("dim0", "dim1") if "dim0" in a else ("axis0", "axis1")
    first, second = (a.get(n, d) % rank for n, d in zip(names, (-2, -1), strict=True))
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return transpose_to(lifter, x, tuple(order))


def _movedim(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    rank = len(x.shape)
    source, target = a["source"], a["destination"]
    source = [d % rank for d in (source if isinstance(source, list) else [source])]
    target = [d % rank for d in (target if isinstance(target, list) else [target])]
    order = [d for d in range(rank) if d not in source]
    for where, what in sorted(zip(target, source, strict=True)):
        order.insert(where, what)
    return transpose_to(lifter, x, tuple(order))


def _expand(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    meta = ir.like(node.meta["val"])
    if meta.shape == x.shape:
        return x
    return lifter.emit("expand", [x], meta.shape, x.dtype, shape=meta.shape)


def _repeat(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """Copies side by side: each dim [n] becomes [copies, n] and is merged."""
    x: Value = a["self"]
    copies = list(a["repeats" if "repeats" in a else "dims"])
    if len(copies) < len(x.shape):  # tile
        copies = [1] * (len(x.shape) - len(copies)) + copies
    sizes = [1] * (len(copies) - len(x.shape)) + list(x.shape)
    apart, spread = [], []
    for count, size in zip(copies, sizes, strict=True):
        if count > 1 and size > 1:
            apart += [1, size]
            spread += [count, size]
        else:
            apart.append(size)
            spread.append(count * size)
    out = reshape_to(lifter, x, tuple(apart))
    if tuple(spread) != out.shape:
        out = lifter.emit("expand", [out], tuple(spread), x.dtype, shape=tuple(spread))
    return reshape_to(lifter, out, ir.like(node.meta["val"]).shape)


def slice_of(lifter: Lifter, x: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
    size = len(range(start, stop, step))
    if size == x.shape[dim]:
        return x
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return lifter.emit("slice", [x], shape, x.dtype, dim=dim, start=start, stop=stop, step=step)


def _slice(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    dim = a["dim"] % len(x.shape)
    start, stop, step = slice(a["start"], a["end"], a["step"]).indices(x.shape[dim])
    return slice_of(lifter, x, dim, start, max(start, stop), step)


def _narrow(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    if isinstance(a["start"], Value):
        raise Unliftable
    dim = a["dim"] % len(x.shape)
    start = a["start"] % x.shape[dim] if a["start"] < 0 else a["start"]
    return slice_of(lifter, x, dim, start, start + a["length"])


def _select(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    dim = a["dim"] % len(x.shape)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    index = a["index"] % x.shape[dim]
    return lifter.emit("select", [x], shape, x.dtype, dim=dim, index=index)


def _split(lifter: Lifter, node: fx.Node, a: Arguments) -> list[Value]:
    x: Value = a["self"]
    dim = a["dim"] % len(x.shape)
    metas = [ir.like(t) for t in node.meta["val"]]
    if len(metas) == 1:
        return [x]
    sizes = tuple(m.shape[dim] for m in metas)
    return lifter.emit_many("split", [x], metas, dim=dim, sizes=sizes)


def _unbind(lifter: Lifter, node: fx.Node, a: Arguments) -> list[Value]:
    x: Value = a["self"]
    dim = a["dim"] % len(x.shape)
    metas = [ir.like(t) for t in node.meta["val"]]
    if len(metas) == 1:
        return [reshape_to(lifter, x, metas[0].shape)]
    return lifter.emit_many("split", [x], metas, dim=dim, sizes=(1,) * len(metas), squeeze=True)


def _cat(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    meta = ir.like(node.meta["val"])
    operands: list[Value] = []
    for x in a["tensors"]:
        if x.shape == (0,) and len(meta.shape) > 1:
            continue  # an old custom: an empty list of tensors starts as tensor([])
        if x.dtype != meta.dtype:
            x = lifter.emit("cast", [x], x.shape, meta.dtype, dtype=meta.dtype)
        operands.append(x)
    if len(operands) == 1:
        return operands[0]
    return lifter.emit("cat", operands, meta.shape, meta.dtype, dim=a["dim"] % len(meta.shape))


def _stack(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    meta = ir.like(node.meta["val"])
    if any(x.dtype != meta.dtype for x in a["tensors"]):
        raise Unliftable
    dim = a["dim"] % len(meta.shape)
    return lifter.emit("stack", a["tensors"], meta.shape, meta.dtype, dim=dim)


def _pad(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    if a.get("mode", "constant") != "constant":
        raise Unliftable
    pairs = [(a["pad"][i], a["pad"][i + 1]) for i in range(0, len(a["pad"]), 2)][::-1]
    pairs = [(0, 0)] * (len(x.shape) - len(pairs)) + pairs
    for dim, (low, high) in enumerate(pairs):  # less than nothing is cut off
        if min(low, high) < 0:
            x = slice_of(lifter, x, dim, max(0, -low), x.shape[dim] - max(0, -high))
    low_high = [(max(0, low), max(0, high)) for low, high in pairs]
    if not any(map(any, low_high)):
        return x
    value = 0 if a["value"] is None else a["value"]  # not `or`: -0.0 has a sign
    meta = ir.like(node.meta["val"])
    if not x.is_float:
        value = int(value)
    return lifter.emit("pad", [x], meta.shape, x.dtype, low_high=low_high, value=value)


def _flip(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    dims = tuple(d % len(x.shape) for d in a["dims"])
    return lifter.emit("flip", [x], x.shape, x.dtype, dims=dims)


def _roll(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    if not a["dims"]:
        raise Unliftable
    dims = tuple(d % len(x.shape) for d in a["dims"])
    return lifter.emit("roll", [x], x.shape, x.dtype, dims=dims, shifts=tuple(a["shifts"]))


def _band(kind: str) -> Lift:
    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        x: Value = a["self"]
        return lifter.emit(kind, [x], x.shape, x.dtype, diagonal=a["diagonal"])

    return lift


# -- made from nothing ----------------------------------------------------------------------------


def full_of(lifter: Lifter, shape: tuple[int, ...], value: Any, dtype: str) -> Value:
    return lifter.emit("full", [], shape, dtype, shape=shape, value=value, dtype=dtype)


def _filled(value: Any = None) -> Lift:
    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        meta = ir.like(node.meta["val"])
        fill = a.get("fill_value", a.get("value", a.get("s"))) if value is None else value
        if isinstance(fill, Value):  # fill with a tensor's value
            if fill.dtype != meta.dtype:
                fill = lifter.emit("cast", [fill], fill.shape, meta.dtype, dtype=meta.dtype)
            return lifter.emit("expand", [fill], meta.shape, meta.dtype, shape=meta.shape)
        if meta.dtype == "bool":
            fill = bool(fill)
        return full_of(lifter, meta.shape, fill, meta.dtype)

    return lift


def _arange(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    meta = ir.like(node.meta["val"])
    start, stop, step = a.get("start", 0), a["end"], a.get("step", 1)
    return lifter.emit(
        "arange", [], meta.shape, meta.dtype, start=start, stop=stop, step=step, dtype=meta.dtype
    )


def _linspace(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    meta = ir.like(node.meta["val"])
    start, stop, count = a["start"], a["end"], a["steps"]
    if isinstance(start, Value) or isinstance(stop, Value) or count < 2:
        raise Unliftable
    step = (stop - start) / (count - 1)
    values = [start + step * i if i < count // 2 else stop - step * (count - 1 - i)
              for i in range(count)]  # fmt: skip
    return lifter.emit("constant", [], meta.shape, meta.dtype, value=values, dtype=meta.dtype)


def _broadcast(lifter: Lifter, node: fx.Node, a: Arguments) -> list[Value]:
    shape = tuple(node.meta["val"][0].shape)
    return [
        x if x.shape == shape else lifter.emit("expand", [x], shape, x.dtype, shape=shape)
        for x in a["tensors"]
    ]


def _meshgrid(lifter: Lifter, node: fx.Node, a: Arguments) -> list[Value]:
    """Each vector along its own dim of the shape that all of them span."""
    vectors = a["tensors"]
    swapped = a.get("indexing") == "xy" and len(vectors) > 1
    grids = []
    for place, x in enumerate(vectors):
        dim = 1 - place if swapped and place < 2 else place
        meta = ir.like(node.meta["val"][place])
        thin = tuple(n if d == dim else 1 for d, n in enumerate(meta.shape))
        x = reshape_to(lifter, x, thin)
        grids.append(lifter.emit("expand", [x], meta.shape, x.dtype, shape=meta.shape))
    return grids


def _stacked(dim: int) -> Lift:
    """`vstack` and `hstack`: a cat of what has dims enough."""

    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Any:
        if any(len(x.shape) < 2 for x in a["tensors"]):
            raise Unliftable
        return _cat(lifter, node, {**a, "dim": dim})

    return lift


def _outer(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, y = a["self"], a["vec2"]
    meta = ir.like(node.meta["val"])
    column = (*x.shape, 1)
    x = lifter.emit("reshape", [x], column, x.dtype, shape=column)
    return lifter.emit("mul", [x, y], meta.shape, meta.dtype)


def _eye(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """One where the row's number is the column's."""
    meta = ir.like(node.meta["val"])
    rows, columns = (
        lifter.emit("arange", [], (n,), "int64", start=0, stop=n, step=1, dtype="int64")
        for n in meta.shape
    )
    column = (meta.shape[0], 1)
    rows = lifter.emit("reshape", [rows], column, "int64", shape=column)
    same = lifter.emit("eq", [rows, columns], meta.shape, "bool")
    return lifter.emit("cast", [same], meta.shape, meta.dtype, dtype=meta.dtype)


def _triangle(find: Callable[..., torch.Tensor]) -> Lift:
    """`tril_indices`, `triu_indices`: their numbers."""

    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        with without_modes():
            made = find(a["row"], a["col"], a["offset"]).tolist()
        meta = ir.like(node.meta["val"])
        return lifter.emit("constant", [], meta.shape, meta.dtype, value=made, dtype=meta.dtype)

    return lift


_RESHAPES = (
    "view reshape _unsafe_view view_as reshape_as flatten unflatten squeeze unsqueeze "
    "_reshape_alias atleast_2d"
)


SHAPES: dict[str, Lift] = {
    "as_strided": as_strided,
    **{name: _reshape for name in _RESHAPES.split()},
    "permute": _permute,
    **{name: _swap for name in ("transpose", "t", "numpy_T", "mT", "swapaxes", "swapdims")},
    "movedim": _movedim,
    **{name: _expand for name in ("expand", "expand_as", "broadcast_to")},
    "repeat": _repeat,
    "tile": _repeat,
    "repeat_interleave": repeat_interleave,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    **{name: _split for name in ("split", "split_with_sizes", "chunk", "tensor_split")},
    "unbind": _unbind,
    **{name: _cat for name in ("cat", "concat", "concatenate")},
    "stack": _stack,
    "pad": _pad,
    "constant_pad_nd": _pad,
    "flip": _flip,
    "roll": _roll,
    "tril": _band("tril"),
    "triu": _band("triu"),
    **{name: _filled(0) for name in "zeros zeros_like new_zeros zero".split()},
    **{name: _filled(0) for name in "empty empty_like new_empty".split()},
    **{name: _filled(1) for name in "ones ones_like new_ones".split()},
    **{name: _filled() for name in "full full_like new_full fill scalar_tensor".split()},
    "broadcast_tensors": _broadcast,
    "meshgrid": _meshgrid,
    "vstack": _stacked(0),
    "hstack": _stacked(1),
    "outer": _outer,
    "eye": _eye,
    "tril_indices": _triangle(torch.tril_indices),
    "triu_indices": _triangle(torch.triu_indices),
    "arange": _arange,
    "linspace": _linspace,
}
