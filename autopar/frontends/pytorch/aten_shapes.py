"""Aten ops that move elements around or make tensors from nothing, as op kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.frontends.pytorch.aten_call import Call, Lift, Unliftable
from autopar.frontends.pytorch.aten_repeats import repeat_interleave
from autopar.frontends.pytorch.aten_strided import as_strided
from autopar.frontends.pytorch.ir import Value
from autopar.torch_private.modes import without_modes


def _reshape(call: Call) -> Value:
    if call.made.dtype != call.x.dtype:  # view(dtype): the same bytes under another name
        raise Unliftable
    return call.lifter.reshape(call.x, call.made.shape)


def _permute(call: Call) -> Value:
    rank = len(call.x.shape)
    return call.lifter.transpose(call.x, tuple(d % rank for d in call["dims"]))


def _swap(call: Call) -> Value:
    rank = len(call.x.shape)
    if rank < 2:
        return call.x
    names = ("dim0", "dim1") if "dim0" in call.arguments else ("axis0", "axis1")
    first, second = (call.get(n, d) % rank for n, d in zip(names, (-2, -1), strict=True))
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return call.lifter.transpose(call.x, tuple(order))


def _movedim(call: Call) -> Value:
    rank = len(call.x.shape)
    source, target = (
        [d % rank for d in (dims if isinstance(dims, list) else [dims])]
        for dims in (call["source"], call["destination"])
    )
    order = [d for d in range(rank) if d not in source]
    for where, what in sorted(zip(target, source, strict=True)):
        order.insert(where, what)
    return call.lifter.transpose(call.x, tuple(order))


def _repeat(call: Call) -> Value:
    """Copies side by side: each dim [n] becomes [copies, n] and is merged."""
    x, lifter = call.x, call.lifter
    copies = list(call["repeats" if "repeats" in call.arguments else "dims"])
    copies = [1] * (len(x.shape) - len(copies)) + copies  # tile may have fewer
    sizes = [1] * (len(copies) - len(x.shape)) + list(x.shape)
    apart: list[int] = []
    spread: list[int] = []
    for count, size in zip(copies, sizes, strict=True):
        if count > 1 and size > 1:
            apart += [1, size]
            spread += [count, size]
        else:
            apart.append(size)
            spread.append(count * size)
    out = lifter.expand(lifter.reshape(x, tuple(apart)), tuple(spread))
    return lifter.reshape(out, call.made.shape)


def _slice(call: Call) -> Value:
    size = call.x.shape[call.dim]
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(size)
    return call.lifter.slice(call.x, call.dim, start, max(start, stop), step)


def _narrow(call: Call) -> Value:
    start = call["start"]
    if isinstance(start, Value):
        raise Unliftable
    if start < 0:
        start %= call.x.shape[call.dim]
    return call.lifter.slice(call.x, call.dim, start, start + call["length"])


def _select(call: Call) -> Value:
    x, dim = call.x, call.dim
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    index = call["index"] % x.shape[dim]
    return call.lifter.emit("select", [x], shape, x.dtype, dim=dim, index=index)


def _split(call: Call) -> list[Value]:
    made, dim = call.several, call.dim
    if len(made) == 1:
        return [call.x]
    sizes = tuple(m.shape[dim] for m in made)
    return call.lifter.emit_many("split", [call.x], made, dim=dim, sizes=sizes)


def _unbind(call: Call) -> list[Value]:
    made = call.several
    if len(made) == 1:
        return [call.lifter.reshape(call.x, made[0].shape)]
    ones = (1,) * len(made)
    return call.lifter.emit_many("split", [call.x], made, dim=call.dim, sizes=ones, squeeze=True)


def _cat(call: Call) -> Value:
    made = call.made
    # An old custom: an empty list of tensors starts as tensor([]).
    parts = [x for x in call["tensors"] if x.shape != (0,) or len(made.shape) <= 1]
    operands = [call.lifter.as_dtype(x, made.dtype) for x in parts]
    if len(operands) == 1:
        return operands[0]
    return call.result("cat", *operands, dim=call["dim"] % len(made.shape))


def _stack(call: Call) -> Value:
    made = call.made
    if any(x.dtype != made.dtype for x in call["tensors"]):
        raise Unliftable
    return call.result("stack", *call["tensors"], dim=call["dim"] % len(made.shape))


def _pad(call: Call) -> Value:
    x, mode = call.x, call.get("mode", "constant")
    if mode == "circular":
        return _padded_around(call)
    if mode != "constant":
        raise Unliftable
    pad = call["pad"]
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    pairs = [(0, 0)] * (len(x.shape) - len(pairs)) + pairs
    for dim, (low, high) in enumerate(pairs):  # less than nothing is cut off
        if min(low, high) < 0:
            x = call.lifter.slice(x, dim, max(0, -low), x.shape[dim] - max(0, -high))
    low_high = [(max(0, low), max(0, high)) for low, high in pairs]
    if not any(map(any, low_high)):
        return x
    value = 0 if call["value"] is None else call["value"]  # not `or`: -0.0 has a sign
    value = value if x.is_float else int(value)
    return call.lifter.emit("pad", [x], call.made.shape, x.dtype, low_high=low_high, value=value)


def _padded_around(call: Call) -> Value:
    """The last places in front and the first ones behind, dim by dim."""
    x, pad, lifter = call.x, call["pad"], call.lifter
    if min(pad) < 0:
        raise Unliftable
    for i in range(0, len(pad), 2):
        dim = len(x.shape) - 1 - i // 2
        size = x.shape[dim]
        ends = [(size - pad[i], size), (0, size), (0, pad[i + 1])]
        parts = [lifter.slice(x, dim, *end) for end in ends if end[0] < end[1]]
        if len(parts) > 1:
            shape = (*x.shape[:dim], size + pad[i] + pad[i + 1], *x.shape[dim + 1 :])
            x = lifter.emit("cat", parts, shape, x.dtype, dim=dim)
    return x


def _flip(call: Call) -> Value:
    dims = tuple(d % len(call.x.shape) for d in call["dims"])
    return call.lifter.emit_like("flip", call.x, dims=dims)


def _roll(call: Call) -> Value:
    if not call["dims"]:
        raise Unliftable
    dims = tuple(d % len(call.x.shape) for d in call["dims"])
    return call.lifter.emit_like("roll", call.x, dims=dims, shifts=tuple(call["shifts"]))


def _band(kind: str) -> Lift:
    return lambda call: call.lifter.emit_like(kind, call.x, diagonal=call["diagonal"])


# -- made from nothing ----------------------------------------------------------------------------


def _filled(value: Any = None) -> Lift:
    def lift(call: Call) -> Value:
        made = call.made
        fill = call.get("fill_value", call.get("value", call.get("s"))) if value is None else value
        if isinstance(fill, Value):  # fill with a tensor's value
            fill = call.lifter.as_dtype(fill, made.dtype)
            return call.result("expand", fill, shape=made.shape)
        fill = bool(fill) if made.dtype == "bool" else fill
        return call.lifter.full(made.shape, fill, made.dtype)

    return lift


def _arange(call: Call) -> Value:
    start, stop, step = call.get("start", 0), call["end"], call.get("step", 1)
    return call.result("arange", start=start, stop=stop, step=step, dtype=call.made.dtype)


def _linspace(call: Call) -> Value:
    start, stop, count = call["start"], call["end"], call["steps"]
    if isinstance(start, Value) or isinstance(stop, Value) or count < 2:
        raise Unliftable
    step = (stop - start) / (count - 1)
    values = [start + step * i if i < count // 2 else stop - step * (count - 1 - i)
              for i in range(count)]  # fmt: skip
    return call.result("constant", value=values, dtype=call.made.dtype)


def _broadcast(call: Call) -> list[Value]:
    shape = tuple(call.node.meta["val"][0].shape)
    return [call.lifter.expand(x, shape) for x in call["tensors"]]


def _meshgrid(call: Call) -> list[Value]:
    """Each vector along its own dim of the shape that all of them span."""
    vectors = call["tensors"]
    swapped = call.get("indexing") == "xy" and len(vectors) > 1
    grids = []
    for place, (x, made) in enumerate(zip(vectors, call.several, strict=True)):
        dim = 1 - place if swapped and place < 2 else place
        along = tuple(n if d == dim else 1 for d, n in enumerate(made.shape))
        x = call.lifter.reshape(x, along)
        grids.append(call.lifter.emit("expand", [x], made.shape, x.dtype, shape=made.shape))
    return grids


def _stacked(dim: int) -> Lift:
    """`vstack` and `hstack`: a cat of what has dims enough."""

    def lift(call: Call) -> Any:
        if any(len(x.shape) < 2 for x in call["tensors"]):
            raise Unliftable
        return _cat(call.but(dim=dim))

    return lift


def _outer(call: Call) -> Value:
    column = call.lifter.reshape(call["self"], (*call.x.shape, 1))
    return call.result("mul", column, call["vec2"])


def _eye(call: Call) -> Value:
    """One where the row's number is the column's."""
    made = call.made
    rows, columns = (call.lifter.arange(n) for n in made.shape)
    rows = call.lifter.reshape(rows, (made.shape[0], 1))
    same = call.lifter.emit("eq", [rows, columns], made.shape, "bool")
    return call.result("cast", same, dtype=made.dtype)


def _triangle(find: Callable[..., torch.Tensor]) -> Lift:
    """`tril_indices`, `triu_indices`: their numbers."""

    def lift(call: Call) -> Value:
        with without_modes():
            made = find(call["row"], call["col"], call["offset"]).tolist()
        return call.result("constant", value=made, dtype=call.made.dtype)

    return lift


_RESHAPES = (
    "view reshape _unsafe_view view_as reshape_as flatten unflatten squeeze unsqueeze "
    "_reshape_alias"
)


def _at_least(call: Call) -> Value:
    if not isinstance(call.x, Value):
        raise Unliftable  # several tensors
    return call.lifter.reshape(call.x, call.made.shape)


SHAPES: dict[str, Lift] = {
    "as_strided": as_strided,
    **{f"atleast_{n}d": _at_least for n in (1, 2, 3)},
    **{name: _reshape for name in _RESHAPES.split()},
    "permute": _permute,
    **{name: _swap for name in ("transpose", "t", "numpy_T", "mT", "swapaxes", "swapdims")},
    "movedim": _movedim,
    **{name: Call.spread for name in ("expand", "expand_as", "broadcast_to")},
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
    **{name: _band(name) for name in ("tril", "triu")},
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
