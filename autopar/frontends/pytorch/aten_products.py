"""Matrix products, convolutions and pooling, as op kinds."""

from __future__ import annotations

from typing import Any

import torch

from autopar.frontends.pytorch.aten_call import Call, Lift, Unliftable, torch_call
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


def _add_bias(lifter: Lifter, x: Value, bias: Value | None, shape: tuple[int, ...] = ()) -> Value:
    if bias is None:
        return x
    bias = lifter.reshape(bias, shape or bias.shape)
    return lifter.emit_like(
        "add", x, bias, bias=True, torch=torch_call("aten.add.Tensor", "%0", "%1")
    )


def _product(lifter: Lifter, kind: str, a: Value, b: Value) -> Value:
    out = (*a.shape[:-1], b.shape[0] if kind == "linear" else b.shape[-1])
    if kind == "matmul":
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        out = (*lead, a.shape[-2], b.shape[-1])
    name = "linear" if kind == "linear" else "matmul"
    call = torch_call(f"aten.{name}.default", "%0", "%1")
    return lifter.emit(kind, [a, b], out, a.dtype, torch=call)


def _linear(call: Call) -> Value:
    x, weight = call["input"], call["weight"]
    if len(weight.shape) != 2:
        raise Unliftable
    return _add_bias(call.lifter, _product(call.lifter, "linear", x, weight), call["bias"])


def _addmm(call: Call) -> Value:
    bias, x, weight, lifter = call["self"], call["mat1"], call["mat2"], call.lifter
    if call["beta"] == 1 and call["alpha"] == 1 and len(bias.shape) == 1:
        return _add_bias(lifter, _product(lifter, "linear_t", x, weight), bias)
    product = lifter.emit("matmul", [x, weight], (x.shape[0], weight.shape[1]), x.dtype)
    added = _scaled(lifter, bias, call["beta"])
    return lifter.emit(
        "add", [added, _scaled(lifter, product, call["alpha"])], product.shape, x.dtype
    )


def _scaled(lifter: Lifter, x: Value, factor: Any) -> Value:
    return x if factor == 1 else lifter.emit_like("mul", x, other=factor)


def _matmul(call: Call) -> Value:
    x, y = call["self"], call["mat2" if "mat2" in call.arguments else "other"]
    if len(x.shape) < 2 or len(y.shape) < 2:
        return _with_vector(call, x, y)
    flat = len(y.shape) == 2 and (len(x.shape) > 2 or y.role == "parameter")
    return _product(call.lifter, "linear_t" if flat else "matmul", x, y)


def _with_vector(call: Call, x: Value, y: Value) -> Value:
    """A vector is one row on the left and one column on the right."""
    if len(x.shape) == 1:
        x = call.lifter.reshape(x, (1, *x.shape))
    if len(y.shape) == 1:
        y = call.lifter.reshape(y, (*y.shape, 1))
    product = _product(call.lifter, "linear_t" if len(y.shape) == 2 else "matmul", x, y)
    return call.result("reshape", product, shape=call.made.shape)


def _dot(call: Call) -> Value:
    x, y = (v for v in call.arguments.values() if isinstance(v, Value))
    return _with_vector(call, x, y)


def _baddbmm(call: Call) -> Value:
    """``beta * self + alpha * (batch1 @ batch2)``."""
    total = _product(call.lifter, "matmul", call["batch1"], call["batch2"])
    scaled = _scaled(call.lifter, total, call["alpha"])
    return call.lifter.emit_like("add", scaled, _scaled(call.lifter, call["self"], call["beta"]))


def _trilinear(call: Call) -> Value:
    """Three tensors, each with dims of one put in at some places, multiplied and summed over others
    (`torch.nn.Bilinear`)."""
    operands = [call[name] for name in ("i1", "i2", "i3")]
    absent = [{*call[name]} for name in ("expand1", "expand2", "expand3")]
    letters = "abcdefgh"[: len(operands[0].shape) + len(absent[0])]
    terms = ["".join(c for i, c in enumerate(letters) if i not in gone) for gone in absent]
    out = "".join(c for i, c in enumerate(letters) if i not in call["sumdim"])
    return call.result("einsum", *operands, equation=f"{','.join(terms)}->{out}")


def _einsum(call: Call) -> Value:
    return call.result("einsum", *call["tensors"], equation=call["equation"])


def _pair(value: Any, n: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * n if len(values) == 1 else values


def _conv(call: Call) -> Value:
    x, weight = call["input"], call["weight"]
    n = len(weight.shape) - 2
    if len(x.shape) != n + 2 or call.get("transposed"):
        raise Unliftable
    dilation, padding = _pair(call["dilation"], n), call["padding"]
    if padding == "valid":
        padding = [0] * n
    elif padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(r % 2 for r in reach):
            raise Unliftable
        padding = [r // 2 for r in reach]
    out = call.result(
        "conv", x, weight, stride=_pair(call["stride"], n), padding=_pair(padding, n),
        dilation=dilation, groups=call["groups"],
    )  # fmt: skip
    return _add_bias(call.lifter, out, call["bias"], (weight.shape[0], *[1] * n))


# -- pooling --------------------------------------------------------------------------------------


def _pooled(call: Call, kind: str, **attrs: Any) -> Value:
    n = len(call["kernel_size"])
    if len(call.x.shape) != n + 2:
        raise Unliftable
    kernel = _pair(call["kernel_size"], n)
    stride = _pair(call["stride"], n) if call["stride"] else kernel
    padding = _pair(call["padding"], n)
    return call.result(kind, call.x, kernel=kernel, stride=stride, padding=padding, **attrs)


def _max_pool(call: Call) -> Value:
    dilation = _pair(call["dilation"], len(call["kernel_size"]))
    return _pooled(call, "max_pool", dilation=dilation, ceil_mode=call["ceil_mode"])


def _avg_pool(call: Call) -> Value:
    plain = not call["ceil_mode"] and call.get("divisor_override") is None
    if not plain or not (call["count_include_pad"] or not any(call["padding"])):
        raise Unliftable
    return _pooled(call, "avg_pool")


def _adaptive_avg_pool(call: Call) -> Value:
    x, output = call["self"], list(call["output_size"])
    if len(x.shape) != len(output) + 2:
        raise Unliftable
    made = call.made
    if set(output) == {1}:  # a mean over what is left
        dims = tuple(range(2, len(x.shape)))
        return call.lifter.emit("mean", [x], made.shape, x.dtype, dims=dims, keepdim=True)
    return call.result("adaptive_avg_pool", x, output=made.shape[2:])


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
    "_trilinear": _trilinear,
    **{name: _conv for name in ("conv1d", "conv2d", "conv3d", "convolution")},
    **{f"max_pool{n}d": _max_pool for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _avg_pool for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive_avg_pool for n in (1, 2, 3)},
}
