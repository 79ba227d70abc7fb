"""Aten ops that look up or write by index, as op kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments, Lift, Unliftable
from autopar.frontends.pytorch.aten_shapes import reshape_to
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.frontends.pytorch.original_calls import original_call
from autopar.torch_private.ops import op_name, overload_name


def _index(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, indices = a["self"], a["indices"]
    dims = [d for d, index in enumerate(indices) if index is not None]
    operands = [i for i in indices if i is not None]
    if any(i.dtype == "bool" for i in operands):
        raise Unliftable
    meta = ir.like(node.meta["val"])
    return lifter.emit("index", [x, *operands], meta.shape, meta.dtype, dims=dims)


def _lookup(kind: str) -> Lift:
    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        x, index = a["self"], a["index"]
        meta = ir.like(node.meta["val"])
        dim = a["dim"] % max(len(x.shape), 1)
        operands = [x, index]
        if kind == "scatter":
            if a.get("reduce") is not None:
                raise Unliftable
            operands.append(a["src"] if "src" in a else _spread(lifter, x, index, a["value"]))
        return lifter.emit(kind, operands, meta.shape, meta.dtype, dim=dim)

    return lift


def _spread(lifter: Lifter, x: Value, index: Value, value: Any) -> Value:
    """``value``, a number or a tensor without dims, in the shape of ``index``."""
    shape = index.shape
    if not isinstance(value, Value):
        return lifter.emit("full", [], shape, x.dtype, shape=shape, value=value, dtype=x.dtype)
    if value.dtype != x.dtype:
        value = lifter.emit("cast", [value], value.shape, x.dtype, dtype=x.dtype)
    return lifter.emit("expand", [value], shape, x.dtype, shape=shape)


def _scatter_add(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """Into zeros it is a sum of its own; everything else keeps its call."""
    x, index, source = a["self"], a["index"], a["src"]
    zeros = any(n.output is x and n.kind == "full" and not n.attrs["value"] for n in lifter.nodes)
    dim = a["dim"] % max(len(x.shape), 1)
    alike = all(n == x.shape[d] or d == dim for d, n in enumerate(index.shape))
    if not zeros or not x.shape or not alike or index.shape != source.shape:
        return _functional(lifter, node, a)
    shape, dtype = x.shape, x.dtype
    return lifter.emit("scatter_sum", [source, index], shape, dtype, dim=dim, shape=shape)


def _functional(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """An op that writes into its first operand, as the call that gives a new tensor instead."""
    operands = [v for v in _flat(a.values()) if isinstance(v, Value)]
    call = original_call(lifter, node, operands)
    if call is None or len(set(operands)) != len(operands):
        raise Unliftable
    target: Any = node.target
    name = op_name(target).removesuffix("_")
    plain = f"aten.{name}.{overload_name(target)}"
    x = operands[0]
    return lifter.emit(f"aten::{name}", operands, x.shape, x.dtype, torch={**call, "target": plain})


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _index_put(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """A mask, and values for what it chooses, are a choice; everything else keeps its call."""
    x, indices, values = a["self"], a["indices"], a["values"]
    masks = [i for i in indices if i is not None]
    if len(masks) != 1 or masks[0].dtype != "bool" or indices[-1] is not masks[0]:
        return _functional(lifter, node, a)
    if a["accumulate"]:
        raise Unliftable
    (mask,), dim = masks, len(indices) - 1
    rest = x.shape[dim + len(mask.shape) :]
    row = values.shape[max(len(values.shape) - len(rest), 0) :]
    if math.prod(values.shape) == math.prod(row):
        value = reshape_to(lifter, values, row)
    elif len(values.shape) == dim + 1 + len(rest):
        value = _one_by_one(lifter, mask, values, dim)
        value = reshape_to(
            lifter, value, (*value.shape[:dim], *mask.shape, *value.shape[dim + 1 :])
        )
    else:
        return _functional(lifter, node, a)
    shape = (*mask.shape, *(1 for _ in rest))
    return lifter.emit("where", [reshape_to(lifter, mask, shape), value, x], x.shape, x.dtype)


def _one_by_one(lifter: Lifter, mask: Value, values: Value, dim: int) -> Value:
    """Values along ``dim`` for the places that a mask chooses, each at its place of all; where the
    mask is false any."""
    count = math.prod(mask.shape)
    flat = reshape_to(lifter, mask, (count,))
    number = lifter.emit("cast", [flat], (count,), "int64", dtype="int64")
    place = lifter.emit("cumsum", [number], (count,), "int64", dim=0)
    place = lifter.emit("sub", [place], (count,), "int64", other=1)
    place = lifter.emit("clamp", [place], (count,), "int64", min=0, max=None)
    shape = (*values.shape[:dim], count, *values.shape[dim + 1 :])
    return lifter.emit("index_select", [values, place], shape, values.dtype, dim=dim)


def _one_hot(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    meta = ir.like(node.meta["val"])
    return lifter.emit("one_hot", [a["self"]], meta.shape, meta.dtype, classes=meta.shape[-1])


LOOKUPS: dict[str, Lift] = {
    "index": _index,
    "gather": _lookup("gather"),
    "index_select": _lookup("index_select"),
    "scatter": _lookup("scatter"),
    "index_put": _index_put,
    "index_add": _functional,
    "scatter_add": _scatter_add,
    "one_hot": _one_hot,
}
