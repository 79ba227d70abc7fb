"""``embedding_bag``: rows of a table that are put together bag by bag."""

from __future__ import annotations

import math

from autopar.frontends.pytorch.aten_call import Call, torch_call
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Value

_MEAN, _MAX = 1, 2
"""What ``mode`` numbers; 0 adds up."""


def embedding_bag(call: Call) -> list[Value | None]:
    """Bags of one size are rows of a lookup that are put together; others are added up by the bag
    that each row is in. A row of padding is in no bag."""
    check_gradients(call)
    if call["include_last_offset"]:
        raise UnsupportedOpError(
            f"{call.lifter.source}: an embedding bag with include_last_offset=True: give the "
            "offsets without the last one, and leave it out"
        )
    ids, offsets, nodes = call["indices"], call["offsets"], call.lifter.nodes
    first = call.several[0]
    steps = next((n for n in nodes if offsets in n.outputs and n.kind == "arange"), None)
    size = ids.shape[0] // max(first.shape[0], 1)
    even = steps is not None and (steps.attrs["start"], steps.attrs["step"]) == (0, size)
    made = _even_bags(call, size, first) if even else _uneven_bags(call, first)
    return [made, None, None, None]


def check_gradients(call: Call) -> None:
    """Raises `UnsupportedOpError` for tables whose gradients are others than those of a lookup."""
    if call["sparse"]:
        raise UnsupportedOpError(
            f"{call.lifter.source}: a table with sparse=True, whose gradient is some rows, which "
            "no program adds up over ranks: leave sparse out; the numbers are the same"
        )
    if call["scale_grad_by_freq"]:
        raise UnsupportedOpError(
            f"{call.lifter.source}: a table with scale_grad_by_freq=True, whose gradients are "
            "divided by how often the batch has each row: leave it out, or weigh the rows that "
            "are looked up"
        )


def _even_bags(call: Call, size: int, like: Value) -> Value:
    """ids [b * size] -> [b, d]; the largest and the mean of a bag of padding alone are zero."""
    lifter, mode, (bags, width) = call.lifter, call["mode"], like.shape
    ids = lifter.reshape(call["indices"], (bags, size))
    given, dtype = [ids, call["weight"]], like.dtype
    rows = lifter.emit("embedding", given, (bags, size, width), dtype, padding_idx=None)
    keep = _unpadded(call, ids)

    def over(kind: str, x: Value) -> Value:
        shape = (bags, *x.shape[2:])
        return lifter.emit(kind, [x], shape, x.dtype, dims=(1,), keepdim=False)

    if keep is None:
        return over(("sum", "mean", "amax")[mode], _weighed(call, rows, None))
    if mode == _MAX:
        rows = lifter.emit("where", [keep, rows], rows.shape, dtype, b=-math.inf)
        count = over("sum", lifter.as_dtype(keep, dtype))
        some = lifter.emit("gt", [count], count.shape, "bool", other=0)
        return lifter.emit("where", [some, over("amax", rows)], like.shape, dtype, b=0.0)
    total = over("sum", _weighed(call, rows, keep))
    return _mean(call, total, over("sum", lifter.as_dtype(keep, dtype))) if mode else total


def _unpadded(call: Call, ids: Value) -> Value | None:
    """Which ids are no padding [..., 1]; None where none can be."""
    padding, lifter = call.get("padding_idx"), call.lifter
    if padding is None or padding < 0:
        return None
    keep = lifter.emit("ne", [ids], ids.shape, "bool", other=padding)
    return lifter.reshape(keep, (*ids.shape, 1))


def _weighed(call: Call, rows: Value, keep: Value | None) -> Value:
    """``rows`` [..., d] times the weight of each, zero where ``keep`` is false."""
    weights, lifter = call["per_sample_weights"], call.lifter
    if weights is not None:
        rows = lifter.emit_like("mul", rows, lifter.reshape(weights, (*rows.shape[:-1], 1)))
    if keep is not None:
        rows = lifter.emit_like("mul", rows, lifter.as_dtype(keep, rows.dtype))
    return rows


def _mean(call: Call, total: Value, sizes: Value) -> Value:
    """The mean of an empty bag is zero."""
    lifter = call.lifter
    return lifter.emit_like("div", total, lifter.emit_like("clamp", sizes, min=1.0, max=None))


def _uneven_bags(call: Call, like: Value) -> Value:
    """ids [n], offsets [b], where each bag begins -> [b, d]."""
    ids, offsets, lifter = call["indices"], call["offsets"], call.lifter
    if call["mode"] == _MAX:
        raise UnsupportedOpError(
            f'{lifter.source}: an embedding bag of mode "max" whose bags have different sizes: '
            "give ids [samples, size], filled up with padding_idx"
        )
    count, (bags, width), dtype = ids.shape[0], like.shape, like.dtype
    steps = lifter.arange(count, offsets.dtype)
    search = torch_call("aten.searchsorted.Tensor", "%0", "%1", right=True)
    place = lifter.emit("aten::searchsorted", [offsets, steps], (count,), "int64", torch=search)
    column = lifter.reshape(lifter.emit_like("sub", place, other=1), (count, 1))

    def added_up(rows: Value, wide: int) -> Value:
        index = lifter.emit("expand", [column], (count, wide), "int64", shape=(count, wide))
        shape = (bags, wide)
        return lifter.emit("scatter_sum", [rows, index], shape, dtype, dim=0, shape=shape)

    given = [ids, call["weight"]]
    rows = lifter.emit("embedding", given, (count, width), dtype, padding_idx=None)
    keep = _unpadded(call, ids)
    total = added_up(_weighed(call, rows, keep), width)
    if call["mode"] != _MEAN:
        return total
    one = lifter.full((count, 1), 1.0, dtype) if keep is None else lifter.as_dtype(keep, dtype)
    return _mean(call, total, added_up(one, 1))
