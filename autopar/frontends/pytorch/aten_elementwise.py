"""Aten ops that work element by element, casts and reductions, as op kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter

Arguments = dict[str, Any]
Lift = Callable[[Lifter, fx.Node, Arguments], Any]


class Unliftable(Exception):
    """This call of the op has no kind."""


def _result(lifter: Lifter, node: fx.Node, kind: str, inputs: list[Value], **attrs: Any) -> Value:
    """An op whose result is as the trace saw it."""
    meta = ir.like(node.meta["val"])
    return lifter.emit(kind, inputs, meta.shape, meta.dtype, **attrs)


# -- two operands ---------------------------------------------------------------------------------


def _binary(kind: str) -> Lift:
    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        left, right = a["self"], a.get("other", a.get("exponent"))
        alpha = a.get("alpha", 1)
        if alpha != 1:
            if isinstance(right, Value):
                right = lifter.emit("mul", [right], right.shape, right.dtype, other=alpha)
            else:
                right = right * alpha
        return _two(lifter, node, kind, left, right)

    return lift


def _two(lifter: Lifter, node: fx.Node, kind: str, left: Any, right: Any) -> Value:
    if isinstance(left, Value) and isinstance(right, Value):
        return _result(lifter, node, kind, [left, right])
    if isinstance(left, Value):
        return _result(lifter, node, kind, [left], other=right)
    return _result(lifter, node, kind, [right], other=left, scalar_first=True)


def _rsub(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    if a.get("alpha", 1) != 1:
        raise Unliftable
    return _two(lifter, node, "sub", a["other"], a["self"])


def _div(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    kinds = {None: "div", "floor": "floor_divide"}
    if a.get("rounding_mode") not in kinds:
        raise Unliftable
    return _two(lifter, node, kinds[a.get("rounding_mode")], a["self"], a["other"])


# -- one operand ----------------------------------------------------------------------------------


def _unary(kind: str, **names: str) -> Lift:
    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        x = next(iter(a.values()))
        return _result(lifter, node, kind, [x], **{k: a[v] for k, v in names.items()})

    return lift


def _softplus(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    if a["beta"] != 1 or a["threshold"] != 20:
        raise Unliftable
    return _result(lifter, node, "softplus", [a["self"]])


def _elu(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    if a["scale"] != 1 or a["input_scale"] != 1:
        raise Unliftable
    return _result(lifter, node, "elu", [a["self"]], alpha=a["alpha"])


def _clamp(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    low, high = a.get("min"), a.get("max")
    if isinstance(low, Value) or isinstance(high, Value):
        x = a["self"]
        for kind, bound in (("maximum", low), ("minimum", high)):
            if isinstance(bound, Value):
                x = _result(lifter, node, kind, [x, bound])
            elif bound is not None:
                raise Unliftable
        return x  # type: ignore[no-any-return]
    return _result(lifter, node, "clamp", [a["self"]], min=low, max=high)


def _relu6(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    return _result(lifter, node, "hardtanh", [a["self"]], min_val=0.0, max_val=6.0)


def _same(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    value: Value = next(iter(a.values()))
    return value


def _detach(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x: Value = a["self"]
    return _result(lifter, node, "detach", [x]) if x.is_float else x


def _cast(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """`to` in all its forms: a cast, or nothing where the dtype stays."""
    x: Value = a["self"]
    meta = ir.like(node.meta["val"])
    asked = a.get("dtype") is not None and x.dtype == "float32"
    if meta.dtype == x.dtype and not asked:
        return x  # casts to float32 are kept for a while, see `rewrite`
    return lifter.emit("cast", [x], x.shape, meta.dtype, dtype=meta.dtype)


def _copy(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """`x.copy_(src)`: the source, cast and spread to x's dtype and shape."""
    x, src = a["self"], a["src"]
    if src.dtype != x.dtype:
        src = lifter.emit("cast", [src], src.shape, x.dtype, dtype=x.dtype)
    if src.shape != x.shape:
        src = lifter.emit("expand", [src], x.shape, x.dtype, shape=x.shape)
    return src  # type: ignore[no-any-return]


def _where(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    operands, attrs = [a["condition"]], {}
    for name, argument in (("a", "self"), ("b", "other")):
        if isinstance(a.get(argument), Value):
            operands.append(a[argument])
        elif a.get(argument) is None:
            raise Unliftable
        else:
            attrs[name] = a[argument]
    return _result(lifter, node, "where", operands, **attrs)


def _masked_fill(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, mask, value = a["self"], a["mask"], a["value"]
    if isinstance(value, Value):
        return _result(lifter, node, "where", [mask, value, x])
    return _result(lifter, node, "masked_fill", [x, mask], value=value)


# -- reductions -----------------------------------------------------------------------------------


def _dims(x: Value, dim: Any) -> tuple[int, ...]:
    """Reduced dims, none of them negative; None and [] stand for all."""
    if dim is None or dim == []:
        return tuple(range(len(x.shape)))
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return tuple(sorted(d % max(len(x.shape), 1) for d in dims))


def _reduction(kind: str) -> Lift:
    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        x: Value = a["self"]
        meta = ir.like(node.meta["val"])
        if x.shape == () and meta.dtype == x.dtype:
            return x
        if x.shape == ():
            raise Unliftable
        if a.get("dtype") is not None and meta.dtype != x.dtype:
            x = lifter.emit("cast", [x], x.shape, meta.dtype, dtype=meta.dtype)
        over = {"dims": _dims(x, a.get("dim")), "keepdim": bool(a.get("keepdim", False))}
        if kind == "sum":
            return _summed(lifter, node, kind, x, **over)
        return _result(lifter, node, kind, [x], **over)

    return lift


def _extremum(kind: str) -> Lift:
    """`max` and `min`: over all, over one dim (with places), or of two tensors."""

    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Any:
        x: Value = a["self"]
        if isinstance(a.get("other"), Value):
            pair = "maximum" if kind == "amax" else "minimum"
            return _result(lifter, node, pair, [x, a["other"]])
        if "dim" not in a:
            return _result(lifter, node, kind, [x], dims=_dims(x, None), keepdim=False)
        values, places = (ir.like(t) for t in node.meta["val"])
        dim, keep = a["dim"] % len(x.shape), a["keepdim"]
        if kind == "amin":
            x = lifter.emit("neg", [x], x.shape, x.dtype)
        top = lifter.emit("amax", [x], values.shape, values.dtype, dims=(dim,), keepdim=keep)
        place = lifter.emit("argmax", [x], places.shape, places.dtype, dim=dim, keepdim=keep)
        if kind == "amin":
            top = lifter.emit("neg", [top], values.shape, values.dtype)
        return [top, place]

    return lift


def _argmax(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    if a["dim"] is None:
        raise Unliftable
    x = a["self"]
    return _result(lifter, node, "argmax", [x], dim=a["dim"] % len(x.shape), keepdim=a["keepdim"])


def _argmin(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x = a["self"]
    return _argmax(lifter, node, {**a, "self": lifter.emit("neg", [x], x.shape, x.dtype)})


def _variance(root: bool) -> Lift:
    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        x = a["self"]
        correction = a.get("correction", 1 if a.get("unbiased", True) else 0)
        correction = 1 if correction is None else correction
        out = _result(
            lifter, node, "var", [x],
            dims=_dims(x, a.get("dim")), keepdim=bool(a.get("keepdim")), correction=correction,
        )  # fmt: skip
        return _result(lifter, node, "sqrt", [out]) if root else out

    return lift


def _cumsum(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, dtype = a["self"], ir.like(node.meta["val"]).dtype
    if a.get("dtype") is not None and dtype != x.dtype:
        x = lifter.emit("cast", [x], x.shape, dtype, dtype=dtype)
    return _summed(lifter, node, "cumsum", x, dim=a["dim"] % max(len(x.shape), 1))


def _summed(lifter: Lifter, node: fx.Node, kind: str, x: Value, **attrs: Any) -> Value:
    """A sum, which torch makes of integers in int64, in the dtype that the trace saw."""
    meta = ir.like(node.meta["val"])
    own = x.dtype if x.is_float or "complex" in x.dtype else "int64"
    total = lifter.emit(kind, [x], meta.shape, own, **attrs)
    if meta.dtype == own:
        return total
    return lifter.emit("cast", [total], meta.shape, meta.dtype, dtype=meta.dtype)


def _logsumexp(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """``m + log(sum(exp(x - m)))`` with the maximum as a constant."""
    x = a["self"]
    dims = _dims(x, a["dim"])
    kept = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    top = lifter.emit("amax", [x], kept, x.dtype, dims=dims, keepdim=True)
    top = lifter.emit("detach", [top], kept, x.dtype)
    less = lifter.emit("sub", [x, top], x.shape, x.dtype)
    powers = lifter.emit("exp", [less], x.shape, x.dtype)
    total = lifter.emit("sum", [powers], kept, x.dtype, dims=dims, keepdim=True)
    log = lifter.emit("log", [total], kept, x.dtype)
    out = lifter.emit("add", [log, top], kept, x.dtype)
    meta = ir.like(node.meta["val"])
    if meta.shape != kept:
        out = lifter.emit("reshape", [out], meta.shape, x.dtype, shape=meta.shape)
    return out


def _log1p(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    more = _result(lifter, node, "add", [a["self"]], other=1.0)
    return _result(lifter, node, "log", [more])


ELEMENTWISE: dict[str, Lift] = {
    **{
        name: _binary(name)
        for name in (
            "add sub mul pow maximum minimum eq ne lt le gt ge remainder floor_divide"
        ).split()
    },
    "rsub": _rsub,
    "div": _div,
    "true_divide": _binary("div"),
    **{name: _binary("and") for name in ("logical_and", "bitwise_and", "__and__")},
    **{name: _binary("or") for name in ("logical_or", "bitwise_or", "__or__")},
    **{name: _binary("xor") for name in ("logical_xor", "bitwise_xor", "__xor__")},
    **{
        name: _unary(name)
        for name in (
            "neg exp log sqrt rsqrt tanh sigmoid relu silu sin cos abs erf square mish reciprocal "
            "isinf isnan sign floor"
        ).split()
    },
    **{name: _unary("not") for name in ("logical_not", "bitwise_not")},
    "gelu": _unary("gelu", approximate="approximate"),
    "leaky_relu": _unary("leaky_relu", negative_slope="negative_slope"),
    "hardtanh": _unary("hardtanh", min_val="min_val", max_val="max_val"),
    "relu6": _relu6,
    "elu": _elu,
    "softplus": _softplus,
    "log1p": _log1p,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    **{
        name: _same
        for name in (
            "alias contiguous clone lift_fresh lift_fresh_copy lift resolve_conj resolve_neg "
            "positive"
        ).split()
    },
    "detach": _detach,
    **{name: _cast for name in ("to", "_to_copy", "type_as", "float", "half", "double", "long")},
    "copy": _copy,
    "where": _where,
    "masked_fill": _masked_fill,
}

REDUCTIONS: dict[str, Lift] = {
    **{name: _reduction(name) for name in ("sum", "mean", "amax", "amin", "any", "all")},
    "max": _extremum("amax"),
    "min": _extremum("amin"),
    "argmax": _argmax,
    "argmin": _argmin,
    "var": _variance(root=False),
    "std": _variance(root=True),
    "cumsum": _cumsum,
    "logsumexp": _logsumexp,
}
