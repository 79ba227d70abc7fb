"""Matrix products, convolutions and pooling, as op kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments, Lift, Unliftable
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


def _add_bias(lifter: Lifter, x: Value, bias: Value | None, shape: tuple[int, ...] = ()) -> Value:
    if bias is None:
        return x
    if shape:
        bias = lifter.emit("reshape", [bias], shape, bias.dtype, shape=shape)
    call = {"target": "aten.add.Tensor", "args": ["%0", "%1"], "kwargs": {}}
    return lifter.emit("add", [x, bias], x.shape, x.dtype, bias=True, torch=call)


def _product(lifter: Lifter, node: fx.Node, kind: str, a: Value, b: Value, target: str) -> Value:
    out = (*a.shape[:-1], b.shape[0] if kind == "linear" else b.shape[-1])
    if kind == "matmul":
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        out = (*lead, a.shape[-2], b.shape[-1])
    call = {"target": target, "args": ["%0", "%1"], "kwargs": {}}
    return lifter.emit(kind, [a, b], out, a.dtype, torch=call)


def _linear(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, weight = a["input"], a["weight"]
    if len(weight.shape) != 2:
        raise Unliftable
    product = _product(lifter, node, "linear", x, weight, "aten.linear.default")
    return _add_bias(lifter, product, a["bias"])


def _addmm(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    bias, x, weight = a["self"], a["mat1"], a["mat2"]
    if a["beta"] == 1 and a["alpha"] == 1 and len(bias.shape) == 1:
        product = _product(lifter, node, "linear_t", x, weight, "aten.matmul.default")
        return _add_bias(lifter, product, bias)
    made = (x.shape[0], weight.shape[1])
    product = lifter.emit("matmul", [x, weight], made, x.dtype)
    terms = []
    for term, factor in ((bias, a["beta"]), (product, a["alpha"])):
        scaled = term
        if factor != 1:
            scaled = lifter.emit("mul", [term], term.shape, term.dtype, other=factor)
        terms.append(scaled)
    return lifter.emit("add", terms, made, x.dtype)


def _matmul(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, y = a["self"], a["mat2" if "mat2" in a else "other"]
    if len(x.shape) < 2 or len(y.shape) < 2:
        return _with_vector(lifter, node, x, y)
    flat = len(y.shape) == 2 and (len(x.shape) > 2 or y.role == "parameter")
    return _product(lifter, node, "linear_t" if flat else "matmul", x, y, "aten.matmul.default")


def _with_vector(lifter: Lifter, node: fx.Node, x: Value, y: Value) -> Value:
    """A vector is one row on the left and one column on the right."""
    meta = ir.like(node.meta["val"])
    row, column = (1, *x.shape), (*y.shape, 1)
    if len(x.shape) == 1:
        x = lifter.emit("reshape", [x], row, x.dtype, shape=row)
    if len(y.shape) == 1:
        y = lifter.emit("reshape", [y], column, y.dtype, shape=column)
    kind = "linear_t" if len(y.shape) == 2 else "matmul"
    product = _product(lifter, node, kind, x, y, "aten.matmul.default")
    return lifter.emit("reshape", [product], meta.shape, meta.dtype, shape=meta.shape)


def _dot(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, y = (v for v in a.values() if isinstance(v, Value))
    return _with_vector(lifter, node, x, y)


def _baddbmm(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """``beta * self + alpha * (batch1 @ batch2)``."""
    total = _product(lifter, node, "matmul", a["batch1"], a["batch2"], "aten.matmul.default")
    parts = []
    for value, scale in ((total, a["alpha"]), (a["self"], a["beta"])):
        if scale != 1:
            value = lifter.emit("mul", [value], value.shape, value.dtype, other=scale)
        parts.append(value)
    return lifter.emit("add", parts, total.shape, total.dtype)


def _einsum(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    meta = ir.like(node.meta["val"])
    return lifter.emit("einsum", a["tensors"], meta.shape, meta.dtype, equation=a["equation"])


def _pair(value: Any, n: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * n if len(values) == 1 else values


def _conv(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, weight = a["input"], a["weight"]
    n = len(weight.shape) - 2
    if len(x.shape) != n + 2 or a.get("transposed"):
        raise Unliftable
    dilation, stride, padding = _pair(a["dilation"], n), _pair(a["stride"], n), a["padding"]
    if padding == "valid":
        padding = [0] * n
    elif padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(r % 2 for r in reach):
            raise Unliftable
        padding = [r // 2 for r in reach]
    meta = ir.like(node.meta["val"])
    out = lifter.emit(
        "conv", [x, weight], meta.shape, meta.dtype,
        stride=stride, padding=_pair(padding, n), dilation=dilation, groups=a["groups"],
    )  # fmt: skip
    return _add_bias(lifter, out, a["bias"], (weight.shape[0], *[1] * n))


# -- pooling --------------------------------------------------------------------------------------


def _max_pool(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x = a["self"]
    n = len(a["kernel_size"])
    if len(x.shape) != n + 2:
        raise Unliftable
    kernel = _pair(a["kernel_size"], n)
    meta = ir.like(node.meta["val"])
    return lifter.emit(
        "max_pool", [x], meta.shape, meta.dtype, kernel=kernel,
        stride=_pair(a["stride"], n) if a["stride"] else kernel, padding=_pair(a["padding"], n),
        dilation=_pair(a["dilation"], n), ceil_mode=a["ceil_mode"],
    )  # fmt: skip


def _avg_pool(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x = a["self"]
    n = len(a["kernel_size"])
    plain = not a["ceil_mode"] and a.get("divisor_override") is None
    if len(x.shape) != n + 2 or not plain or not (a["count_include_pad"] or not any(a["padding"])):
        raise Unliftable
    kernel = _pair(a["kernel_size"], n)
    meta = ir.like(node.meta["val"])
    return lifter.emit(
        "avg_pool", [x], meta.shape, meta.dtype, kernel=kernel,
        stride=_pair(a["stride"], n) if a["stride"] else kernel, padding=_pair(a["padding"], n),
    )  # fmt: skip


def _adaptive_avg_pool(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, output = a["self"], list(a["output_size"])
    if len(x.shape) != len(output) + 2:
        raise Unliftable
    meta = ir.like(node.meta["val"])
    if set(output) == {1}:  # a mean over what is left
        dims = tuple(range(2, len(x.shape)))
        return lifter.emit("mean", [x], meta.shape, x.dtype, dims=dims, keepdim=True)
    return lifter.emit("adaptive_avg_pool", [x], meta.shape, meta.dtype, output=meta.shape[2:])


PRODUCTS: dict[str, Lift] = {
    "linear": _linear,
    "addmm": _addmm,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "mv": _dot,
    "dot": _dot,
    "baddbmm": _baddbmm,
    "einsum": _einsum,
    **{name: _conv for name in ("conv1d", "conv2d", "conv3d", "convolution")},
    **{f"max_pool{n}d": _max_pool for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _avg_pool for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive_avg_pool for n in (1, 2, 3)},
}
