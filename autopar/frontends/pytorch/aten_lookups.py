"""Aten ops that look up or write by index, as op kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from autopar.frontends.pytorch.aten_call import Call, Lift, Unliftable
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.frontends.pytorch.original_calls import original_call
from autopar.torch_private.ops import op_name, overload_name


def _index(call: Call) -> Value:
    dims = [d for d, index in enumerate(call["indices"]) if index is not None]
    operands = [i for i in call["indices"] if i is not None]
    if any(i.dtype == "bool" for i in operands):
        raise Unliftable
    return call.result("index", call.x, *operands, dims=dims)


def _lookup(kind: str) -> Lift:
    return lambda call: call.result(kind, call["self"], call["index"], dim=call.dim)


def _scatter(call: Call) -> Value:
    x, index = call["self"], call["index"]
    if call.get("reduce") is not None:
        raise Unliftable
    source = call["src"] if "src" in call.arguments else _spread(call, x, index, call["value"])
    return call.result("scatter", x, index, source, dim=call.dim)


def _spread(call: Call, x: Value, index: Value, value: Any) -> Value:
    """``value``, a number or a tensor without dims, in the shape of ``index``."""
    shape = index.shape
    if not isinstance(value, Value):
        return call.lifter.full(shape, value, x.dtype)
    value = call.lifter.as_dtype(value, x.dtype)
    return call.lifter.emit("expand", [value], shape, x.dtype, shape=shape)


def _scatter_add(call: Call) -> Value:
    """Into zeros it is a sum of its own; everything else keeps its call."""
    x, index, source, dim = call["self"], call["index"], call["src"], call.dim
    nodes = call.lifter.nodes
    zeros = any(n.output is x and n.kind == "full" and not n.attrs["value"] for n in nodes)
    alike = all(n == x.shape[d] or d == dim for d, n in enumerate(index.shape))
    if not zeros or not x.shape or not alike or index.shape != source.shape:
        return _functional(call)
    shape, dtype = x.shape, x.dtype
    return call.lifter.emit("scatter_sum", [source, index], shape, dtype, dim=dim, shape=shape)


def _functional(call: Call) -> Value:
    """An op that writes into its first operand, as the call that gives a new tensor instead."""
    operands = [v for v in _flat(call.arguments.values()) if isinstance(v, Value)]
    original = original_call(call.lifter, call.node, operands)
    if original is None or len(set(operands)) != len(operands):
        raise Unliftable
    target: Any = call.node.target
    name = op_name(target).removesuffix("_")
    plain = {**original, "target": f"aten.{name}.{overload_name(target)}"}
    return call.lifter.emit_like(f"aten::{name}", *operands, torch=plain)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _index_put(call: Call) -> Value:
    """A mask, and values for what it chooses, are a choice; everything else keeps its call."""
    x, indices, values, reshape = call.x, call["indices"], call["values"], call.lifter.reshape
    masks = [i for i in indices if i is not None]
    if len(masks) != 1 or masks[0].dtype != "bool" or indices[-1] is not masks[0]:
        return _functional(call)
    if call["accumulate"]:
        raise Unliftable
    (mask,), dim = masks, len(indices) - 1
    rest = x.shape[dim + len(mask.shape) :]
    row = values.shape[max(len(values.shape) - len(rest), 0) :]
    if math.prod(values.shape) == math.prod(row):
        value = reshape(values, row)
    elif not dim and len(values.shape) == 1 + len(rest) and values.shape[1:] == rest:
        return call.lifter.emit("place_rows", [x, mask, values], x.shape, x.dtype)
    elif len(values.shape) == dim + 1 + len(rest):
        value = _one_by_one(call.lifter, mask, values, dim)
        value = reshape(value, (*value.shape[:dim], *mask.shape, *value.shape[dim + 1 :]))
    else:
        return _functional(call)
    wide = reshape(mask, (*mask.shape, *(1 for _ in rest)))
    return call.lifter.emit("where", [wide, value, x], x.shape, x.dtype)


def _masked_scatter(call: Call) -> Value:
    """Rows of the dims behind those that the mask has, or that it is expanded along."""
    x, mask, reshape = call.x, call["mask"], call.lifter.reshape
    expanded = (n for n in call.lifter.nodes if n.output is mask and n.kind == "expand")
    wide = next((n.inputs[0] for n in expanded if len(n.inputs[0].shape) == len(x.shape)), mask)
    if len(wide.shape) != len(x.shape) or wide.shape[0] != x.shape[0]:
        raise Unliftable
    each = len(x.shape)
    while each > 1 and wide.shape[each - 1] == 1 and x.shape[each - 1] != 1:
        each -= 1
    if wide.shape[:each] != x.shape[:each]:
        raise Unliftable
    rest = x.shape[each:]
    rows, left = divmod(math.prod(call["source"].shape), max(1, math.prod(rest)))
    if left:
        raise Unliftable
    source = reshape(call["source"], (rows, *rest))
    places = reshape(wide, wide.shape[:each])
    return call.lifter.emit("place_rows", [x, places, source], x.shape, x.dtype, more=True)


def _one_by_one(lifter: Lifter, mask: Value, values: Value, dim: int) -> Value:
    """Values along ``dim`` for the places that a mask chooses, each at its place of all; where the
    mask is false any."""
    count = math.prod(mask.shape)
    number = lifter.as_dtype(lifter.reshape(mask, (count,)), "int64")
    place = lifter.emit_like("cumsum", number, dim=0)
    place = lifter.emit_like("sub", place, other=1)
    place = lifter.emit_like("clamp", place, min=0, max=None)
    shape = (*values.shape[:dim], count, *values.shape[dim + 1 :])
    return lifter.emit("index_select", [values, place], shape, values.dtype, dim=dim)


def _one_hot(call: Call) -> Value:
    return call.result("one_hot", call.x, classes=call.made.shape[-1])


LOOKUPS: dict[str, Lift] = {
    "index": _index,
    "gather": _lookup("gather"),
    "index_select": _lookup("index_select"),
    "scatter": _scatter,
    "index_put": _index_put,
    "masked_scatter": _masked_scatter,
    "index_add": _functional,
    "scatter_add": _scatter_add,
    "one_hot": _one_hot,
}
