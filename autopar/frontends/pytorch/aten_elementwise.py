"""Aten ops that work element by element, casts and reductions, as op kinds."""

from __future__ import annotations

from typing import Any

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_call import Call, Lift, Unliftable
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Value
from autopar.torch_private.ops import op_name

# -- two operands ---------------------------------------------------------------------------------


def _binary(kind: str) -> Lift:
    def lift(call: Call) -> Value:
        right, alpha = call.get("other", call.get("exponent")), call.get("alpha", 1)
        if isinstance(right, Value) and alpha != 1:
            right = call.lifter.emit_like("mul", right, other=alpha)
        elif alpha != 1:
            right = right * alpha
        return _two(call, kind, call["self"], right)

    return lift


def _two(call: Call, kind: str, left: Any, right: Any) -> Value:
    if isinstance(left, Value) and isinstance(right, Value):
        for zero, other in ((left, right), (right, left)) if kind == "add" else ():
            if _is_zero(call, zero, other):
                return call.lifter.reshape(other, call.made.shape)
        return call.result(kind, left, right)
    if isinstance(left, Value):
        return call.result(kind, left, other=right)
    return call.result(kind, right, other=left, scalar_first=True)


def _comparison(kind: str) -> Lift:
    """What holds and what does not; ones and zeros of another dtype where that is written in
    place."""

    def lift(call: Call) -> Value:
        if call.made.dtype == "bool":
            return _two(call, kind, call["self"], call["other"])
        left, right = call["self"], call["other"]
        shape, emit = call.made.shape, call.lifter.emit
        if isinstance(right, Value):
            holds = emit(kind, [left, right], shape, "bool")
        else:
            holds = emit(kind, [left], shape, "bool", other=right)
        return call.lifter.as_dtype(holds, call.made.dtype)

    return lift


def _logical(kind: str) -> Lift:
    """Of truths, which numbers are where they are not zero."""

    def lift(call: Call) -> Value:
        _refuse_floats(call)
        both = [_truth(call, call[name]) for name in ("self", "other")]
        holds = call.lifter.emit(kind, both, call.made.shape, "bool")
        return call.lifter.as_dtype(holds, call.made.dtype)  # in place it may be another

    return lift


def _refuse_floats(call: Call) -> None:
    """Raises `UnsupportedOpError` where truths are written in place into floats."""
    if call.made.is_float:
        name = op_name(call.node.target).removesuffix("_")
        raise UnsupportedOpError(
            f"{call.lifter.source}: {name}_ writes what holds into a tensor of floats, of which "
            f"autograd takes no notice: write x = torch.{name}(x, ...), or compare x != 0"
        )


def _truth(call: Call, x: Value) -> Value:
    return x if x.dtype == "bool" else call.lifter.emit("ne", [x], x.shape, "bool", other=0)


def _logical_not(call: Call) -> Value:
    _refuse_floats(call)
    holds = call.lifter.emit_like("not", _truth(call, call.x))
    return call.lifter.as_dtype(holds, call.made.dtype)


def _is_zero(call: Call, zero: Value, other: Value) -> bool:
    """Whether one number is added to another, as where a loss is added up from ``zeros(())``: a
    constant in a sum over the batch would count once for every microbatch."""
    if (
        not {*zero.shape, *other.shape} <= {1}
        or other.dtype != call.made.dtype
        or not other.is_float
    ):
        return False
    maker = call.lifter.maker(zero)
    return maker is not None and maker.kind == "full" and maker.attrs["value"] == 0


def _rsub(call: Call) -> Value:
    if call.get("alpha", 1) != 1:
        raise Unliftable
    return _two(call, "sub", call["other"], call["self"])


def _div(call: Call) -> Value:
    kinds, rounding = {None: "div", "floor": "floor_divide"}, call.get("rounding_mode")
    # Rounded, its gradient is zero, where that of ``//`` is an error.
    if rounding not in kinds or (rounding and call.made.is_float):
        raise Unliftable
    return _two(call, kinds[rounding], call["self"], call["other"])


# -- one operand ----------------------------------------------------------------------------------


def _unary(kind: str, *names: str, **only: Any) -> Lift:
    """``names``: arguments that are attributes; ``only``: what others must be."""

    def lift(call: Call) -> Value:
        if any(call[name] != value for name, value in only.items()):
            raise Unliftable
        return call.result(kind, call.x, **{name: call[name] for name in names})

    return lift


def _clamp(call: Call) -> Value:
    low, high = call.get("min"), call.get("max")
    if not isinstance(low, Value) and not isinstance(high, Value):
        return call.result("clamp", call.x, min=low, max=high)
    x = call.x
    for kind, bound in (("lt", low), ("gt", high)):
        if isinstance(bound, Value):
            # At the limit the gradient is all of x, where that of a maximum is shared.
            beyond = call.lifter.emit(kind, [x, bound], call.made.shape, "bool")
            x = call.result("where", beyond, bound, x)
        elif bound is not None:
            raise Unliftable
    return x


def _detach(call: Call) -> Value:
    return call.result("detach", call.x) if call.x.is_float else call.x


def _cast(call: Call) -> Value:
    """`to` in all its forms: a cast, or nothing where the dtype stays."""
    x, dtype = call.x, call.made.dtype
    if call.get("dtype") is not None and x.dtype == "float32":
        # casts to float32 are kept for a while, see `rewrite`
        return call.lifter.emit("cast", [x], x.shape, dtype, dtype=dtype)
    return call.lifter.as_dtype(x, dtype)


def _copy(call: Call) -> Value:
    """`x.copy_(src)`: the source, cast and spread to x's dtype and shape."""
    source = call.lifter.as_dtype(call["src"], call.x.dtype)
    return call.lifter.expand(source, call.x.shape)


def _where(call: Call) -> Value:
    operands, attrs = [call["condition"]], {}
    for name, argument in (("a", "self"), ("b", "other")):
        value = call.get(argument)
        if value is None:
            raise Unliftable
        if isinstance(value, Value):
            operands.append(value)
        else:
            attrs[name] = value
    return call.result("where", *operands, **attrs)


def _masked_fill(call: Call) -> Value:
    x, mask, value = call["self"], call["mask"], call["value"]
    if isinstance(value, Value):
        return call.result("where", mask, value, x)
    return call.result("masked_fill", x, mask, value=value)


def _log1p(call: Call) -> Value:
    return call.result("log", call.result("add", call.x, other=1.0))


# -- reductions -----------------------------------------------------------------------------------


def _dims(x: Value, dim: Any) -> tuple[int, ...]:
    """Reduced dims, none of them negative; None and [] stand for all."""
    if dim is None or dim == []:
        return tuple(range(len(x.shape)))
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return tuple(sorted(d % max(len(x.shape), 1) for d in dims))


def thin(shape: ir.Shape, dims: ir.Shape) -> ir.Shape:
    """``shape`` with ``dims`` reduced and kept."""
    return tuple(1 if d in dims else n for d, n in enumerate(shape))


def _as_asked(call: Call) -> Value:
    """The operand, in the dtype that the call computes in."""
    return call.x if call.get("dtype") is None else call.lifter.as_dtype(call.x, call.made.dtype)


def _reduction(kind: str) -> Lift:
    def lift(call: Call) -> Value:
        if call.x.shape == () and call.made.dtype == call.x.dtype:
            return call.x
        if call.x.shape == ():
            raise Unliftable
        x = _as_asked(call)
        over = {"dims": _dims(x, call.get("dim")), "keepdim": bool(call.get("keepdim", False))}
        return _summed(call, kind, x, **over) if kind == "sum" else call.result(kind, x, **over)

    return lift


def _extremum(kind: str) -> Lift:
    """`max` and `min`: over all, over one dim (with places), or of two tensors."""

    def lift(call: Call) -> Any:
        x, emit = call.x, call.lifter.emit
        if isinstance(call.get("other"), Value):
            return call.result("maximum" if kind == "amax" else "minimum", x, call["other"])
        if "dim" not in call.arguments:
            return call.result(kind, x, dims=_dims(x, None), keepdim=False)
        values, places = call.several
        dim, keep = call.dim, call["keepdim"]
        if x.dtype == "bool":  # places are asked of numbers alone
            top, place = lift(call.but(self=call.lifter.as_dtype(x, "int64")))
            return [call.lifter.as_dtype(top, "bool"), place]
        if kind == "amin":
            x = call.lifter.emit_like("neg", x)
        one = {"one": True} if x.is_float else {}
        top = emit("amax", [x], values.shape, x.dtype, dims=(dim,), keepdim=keep, **one)
        place = emit("argmax", [x], places.shape, places.dtype, dim=dim, keepdim=keep)
        if kind == "amin":
            top = call.lifter.emit_like("neg", top)
        return [top, place]

    return lift


def _argmax(call: Call) -> Value:
    if call["dim"] is None:
        raise Unliftable
    return call.result("argmax", call.x, dim=call.dim, keepdim=call["keepdim"])


def _argmin(call: Call) -> Value:
    return _argmax(call.but(self=call.lifter.emit_like("neg", call.x)))


def _variance(root: bool) -> Lift:
    def lift(call: Call) -> Value:
        correction = call.get("correction", 1 if call.get("unbiased", True) else 0)
        out = call.result(
            "var", call.x, dims=_dims(call.x, call.get("dim")), keepdim=bool(call.get("keepdim")),
            correction=1 if correction is None else correction,
        )  # fmt: skip
        return call.result("sqrt", out) if root else out

    return lift


def _cumsum(call: Call) -> Value:
    return _summed(call, "cumsum", _as_asked(call), dim=call.dim)


def _summed(call: Call, kind: str, x: Value, **attrs: Any) -> Value:
    """A sum, which torch makes of integers in int64, in the dtype that the trace saw."""
    own = x.dtype if x.is_float or "complex" in x.dtype else "int64"
    total = call.lifter.emit(kind, [x], call.made.shape, own, **attrs)
    return call.lifter.as_dtype(total, call.made.dtype)


def _logsumexp(call: Call) -> Value:
    """``m + log(sum(exp(x - m)))`` with the maximum as a constant."""
    lifter = call.lifter
    x = lifter.as_dtype(call.x, call.made.dtype)  # of integers, too
    dims = _dims(x, call["dim"])
    kept = thin(x.shape, dims)
    top = lifter.emit("amax", [x], kept, x.dtype, dims=dims, keepdim=True)
    top = lifter.emit_like("detach", top)
    powers = lifter.emit_like("exp", lifter.emit_like("sub", x, top))
    total = lifter.emit("sum", [powers], kept, x.dtype, dims=dims, keepdim=True)
    out = lifter.emit_like("add", lifter.emit_like("log", total), top)
    return lifter.reshape(out, call.made.shape)


ELEMENTWISE: dict[str, Lift] = {
    **{
        name: _binary(name)
        for name in ("add sub mul pow maximum minimum remainder floor_divide").split()
    },
    **{name: _comparison(name) for name in "eq ne lt le gt ge".split()},
    "rsub": _rsub,
    "div": _div,
    "true_divide": _binary("div"),
    **{name: _binary("and") for name in ("bitwise_and", "__and__")},
    **{name: _binary("or") for name in ("bitwise_or", "__or__")},
    **{name: _binary("xor") for name in ("bitwise_xor", "__xor__")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor")},
    **{
        name: _unary(name)
        for name in (
            "neg exp log sqrt rsqrt tanh sigmoid relu silu sin cos abs erf square mish reciprocal "
            "isinf isnan sign floor"
        ).split()
    },
    "bitwise_not": _unary("not"),
    "logical_not": _logical_not,
    "gelu": _unary("gelu", "approximate"),
    "leaky_relu": _unary("leaky_relu", "negative_slope"),
    "hardtanh": _unary("hardtanh", "min_val", "max_val"),
    "relu6": lambda call: call.result("hardtanh", call.x, min_val=0.0, max_val=6.0),
    "elu": _unary("elu", "alpha", scale=1, input_scale=1),
    "softplus": _unary("softplus", beta=1, threshold=20),
    "log1p": _log1p,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    **{
        name: lambda call: call.x
        for name in (
            "alias contiguous clone lift_fresh lift_fresh_copy lift resolve_conj resolve_neg "
            "positive real"
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
