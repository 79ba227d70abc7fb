"""One primitive to one or a few ops of `autopar.nouns.kinds`.

A primitive that stands in no table keeps its name, as kind ``jax::name`` with its parameters as
text; such an op has no rule unless the user registers one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.frontends.jax.calls import call_again
from autopar.frontends.jax.contractions import conv, dot_general
from autopar.frontends.jax.draft import Builder, Node, Operand, Shape, Uniform, Value
from autopar.frontends.jax.enlarged import padded, tiled
from autopar.frontends.jax.fourier import PRIMITIVE as FOURIER
from autopar.frontends.jax.fourier import converted as fourier
from autopar.frontends.jax.lookups import SCATTERS, gathered, number, paired
from autopar.rules.table import TABLE as RULED

Outs = Sequence[tuple[Shape, str]]
Convert = Callable[[Mapping[str, Any], list[Operand], Outs, Builder], list[Operand]]

ELEMENTWISE = {
    "neg": "neg", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt", "tanh": "tanh",
    "logistic": "sigmoid", "sin": "sin", "cos": "cos", "abs": "abs", "not": "not", "erf": "erf",
    "square": "square", "sign": "sign", "floor": "floor", "stop_gradient": "detach",
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div", "pow": "pow",
    "max": "maximum", "min": "minimum", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt",
    "ge": "ge", "and": "and", "or": "or", "xor": "xor", "rem": "jax::rem",
    "is_finite": "jax::is_finite",
}  # fmt: skip
REDUCTIONS = {
    "reduce_sum": "sum", "reduce_max": "amax", "reduce_min": "amin",
    "reduce_or": "any", "reduce_and": "all",
}  # fmt: skip
RUNNING = ("cumprod", "cummax", "cummin", "cumlogsumexp")
WINDOWS = ("reduce_window_max", "reduce_window_min", "reduce_window_sum")
SAME = ("copy", "copy_p", "optimization_barrier", "sharding_constraint", "name")


def convert(
    name: str, params: Mapping[str, Any], inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand]:
    """Adds the ops of one equation; returns one operand per result."""
    if name in SAME or (name == "device_put" and not any(params["devices"])):
        return list(inputs)
    if name in ELEMENTWISE:
        shape, dtype = outs[0]
        if name == "div" and not dtype.startswith(("float", "bfloat")):
            return _unknown(name, params, inputs, outs, builder)
        return [builder.op(ELEMENTWISE[name], inputs, shape, dtype)]
    if name in SCATTERS:
        params, inputs = paired(params, inputs, builder)
    if name in REDUCTIONS:
        dims = tuple(sorted(int(d) for d in params["axes"]))
        if not dims:  # as `jnp.unique` has it of one dim
            return inputs[:1]
        if REDUCTIONS[name] in ("any", "all") and outs[0][1] != "bool":  # of bits
            return _unknown(name, params, inputs, outs, builder)
        x = builder.tensor(inputs[0])
        return [builder.op(REDUCTIONS[name], (x,), *outs[0], dims=dims, keepdim=False)]
    converter = TABLE.get(name)
    results = converter(params, inputs, outs, builder) if converter else None
    return _unknown(name, params, inputs, outs, builder) if results is None else results


def _unknown(
    name: str, params: Mapping[str, Any], inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand]:
    values = tuple(Value(s, d) for s, d in outs)
    inputs = [(number(x, builder) or x) if x.shape == () else x for x in inputs]
    made = None if f"jax::{name}" in RULED else call_again(name, params, inputs)
    if made is None:
        attrs: Mapping[str, Any] = {
            "jax": {k: str(v) for k, v in sorted(params.items()) if v is not None}
        }
        operands = tuple(builder.tensor(x) for x in inputs)
    else:
        attrs = made.attrs
        operands = tuple(builder.tensor(inputs[i]) for i in made.operands)
    builder.append(Node(f"jax::{name}", operands, values, attrs, builder.source))
    return list(values)


def _cast(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    shape, dtype = outs[0]
    if isinstance(inputs[0], Uniform):
        value = inputs[0].value
        cast = bool(value) if dtype == "bool" else float(value) if "float" in dtype else int(value)
        return [Uniform(cast, dtype, shape)]
    if inputs[0].dtype == dtype:
        return [inputs[0]]
    return [builder.op("cast", inputs, shape, dtype, dtype=dtype)]


def _integer_pow(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    if params["y"] == 2:
        return [builder.op("square", inputs, *outs[0])]
    return [builder.op("pow", (inputs[0], Uniform(params["y"], outs[0][1])), *outs[0])]


def _exp2(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    return [builder.op("pow", (Uniform(2.0, outs[0][1]), inputs[0]), *outs[0])]


def _select_n(
    params: Any, inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand] | None:
    if len(inputs) != 3 or inputs[0].dtype != "bool":
        if inputs[0].shape != outs[0][0]:
            return None
        return _called("select_n")(params, inputs, outs, builder)
    condition, if_false, if_true = inputs
    return [builder.op("where", (condition, if_true, if_false), *outs[0])]


def _clamp(
    params: Any, inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand] | None:
    """Not a minimum of a maximum, which halve the gradient at the bounds."""
    low, x, high = inputs
    if isinstance(low, Uniform) and isinstance(high, Uniform):
        return [builder.op("clamp", (x,), *outs[0], min=low.value, max=high.value)]
    return None


def _reshape(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    """``dimensions``: an order of dims before it, as `jax.vmap` of a convolution has it."""
    order = params.get("dimensions")
    moved = inputs if order is None else _transpose({"permutation": order}, inputs, outs, builder)
    return _reshaped(params, moved, outs, builder)


def _reshaped(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    return [builder.reshape(inputs[0], outs[0][0])]


def _transpose(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    return [builder.transpose(inputs[0], tuple(int(d) for d in params["permutation"]))]


def _broadcast_in_dim(
    params: Any, inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand]:
    shape = outs[0][0]
    x = inputs[0]
    if isinstance(x, Uniform):
        return [Uniform(x.value, x.dtype, shape)]
    thin = [1] * len(shape)
    for i, dim in enumerate(params["broadcast_dimensions"]):
        thin[int(dim)] = x.shape[i]
    return [builder.expand(builder.reshape(x, tuple(thin)), shape)]


def _slice(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    x = builder.tensor(inputs[0])
    strides = params["strides"] or (1,) * len(x.shape)
    steps = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    for dim, (start, stop, step) in enumerate(steps):
        size = -(-(int(stop) - int(start)) // int(step))
        if size == x.shape[dim] and step == 1:
            continue
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        x = builder.op(
            "slice", (x,), shape, x.dtype, dim=dim, start=int(start), stop=int(stop), step=int(step)
        )
    return [x]


def _dynamic_slice(
    params: Any, inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand] | None:
    starts = [number(s, builder) or s for s in inputs[1:]]
    if not all(isinstance(s, Uniform) for s in starts):
        return None
    sizes = params["slice_sizes"]
    limits = zip(starts, sizes, inputs[0].shape, strict=True)
    first = [min(max(int(s.value), 0), n - k) for s, k, n in limits if isinstance(s, Uniform)]
    stops = [a + k for a, k in zip(first, sizes, strict=True)]
    given = {"start_indices": first, "limit_indices": stops, "strides": None}
    return _slice(given, inputs[:1], outs, builder)


def _split(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    if len(outs) == 1:
        return inputs[:1]
    values = tuple(Value(s, d) for s, d in outs)
    attrs = {"dim": int(params["axis"]), "sizes": tuple(int(s) for s in params["sizes"])}
    operands = (builder.tensor(inputs[0]),)
    builder.append(Node("split", operands, values, attrs, builder.source))
    return list(values)


def _joined(kind: str, dim: str) -> Convert:
    """``dim``: the name of the parameter that has it."""

    def convert(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
        values = [builder.tensor(x) for x in inputs]
        return [builder.op(kind, values, *outs[0], dim=int(params[dim]))]

    return convert


def _rev(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    dims = tuple(int(d) for d in params["dimensions"])
    return [builder.op("flip", (builder.tensor(inputs[0]),), *outs[0], dims=dims)]


def _argmax(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    (dim,) = params["axes"]
    return [builder.op("argmax", inputs, *outs[0], dim=int(dim), keepdim=False)]


def _top_k(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    values = tuple(Value(s, d) for s, d in outs)
    x = builder.tensor(inputs[0])
    dim = int(params.get("axis", -1)) % len(x.shape)
    attrs = {"k": int(params["k"]), "dim": dim}
    builder.append(Node("jax::top_k", (x,), values, attrs, builder.source))
    return list(values)


def _cumsum(
    params: Any, inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand] | None:
    if params["reverse"]:
        return _called("cumsum", "axis", "reverse")(params, inputs, outs, builder)
    return [builder.op("cumsum", inputs, *outs[0], dim=int(params["axis"]))]


def _called(name: str, *options: str) -> Convert:
    """A row of `LAX_CALLS`, with these of its parameters as options."""

    def convert(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
        values = tuple(Value(s, d) for s, d in outs)
        operands = tuple(builder.tensor(x) for x in inputs)
        attrs = {option: _plain(params[option]) for option in options}
        builder.append(Node(f"jax::{name}", operands, values, attrs, builder.source))
        return list(values)

    return convert


def _plain(value: Any) -> Any:
    if isinstance(value, Sequence):
        return tuple(map(_plain, value))
    return value if isinstance(value, bool) else int(value)


def _argmin(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    (dim,) = params["axes"]
    return _called("argmin", "axis")({"axis": dim}, inputs, outs, builder)


def _cholesky(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    """Of the lower half: what makes both halves alike before it is an op of its own."""
    own = {"symmetrize_input": False}
    return _called("cholesky", *own)(own, inputs, outs, builder)


def _round(
    params: Any, inputs: list[Operand], outs: Outs, builder: Builder
) -> list[Operand] | None:
    if int(params["rounding_method"]) != 1:  # halves to the even number
        return None
    return [builder.op("jax::rint", (builder.tensor(inputs[0]),), *outs[0])]


def _reduce_window(name: str) -> Callable[..., list[Operand] | None]:
    window = "window_dimensions window_strides padding base_dilation window_dilation".split()

    def convert(
        params: Any, inputs: list[Operand], outs: Outs, builder: Builder
    ) -> list[Operand] | None:
        if "float" not in outs[0][1]:
            return None
        named = [n for n in window if not n.endswith("dilation") or {*params[n]} != {1}]
        return _called(name, *named)(params, inputs, outs, builder)

    return convert


def _iota(params: Any, inputs: list[Operand], outs: Outs, builder: Builder) -> list[Operand]:
    shape, dtype = outs[0]
    dim = int(params["dimension"])
    size = shape[dim]
    line = builder.op("arange", (), (size,), dtype, start=0, stop=size, step=1, dtype=dtype)
    thin = tuple(size if d == dim else 1 for d in range(len(shape)))
    return [builder.expand(builder.reshape(line, thin), shape)]


TABLE: Mapping[str, Callable[..., list[Operand] | None]] = {
    "convert_element_type": _cast,
    "integer_pow": _integer_pow,
    "exp2": _exp2,
    "select_n": _select_n,
    "clamp": _clamp,
    "reshape": _reshape,
    "squeeze": _reshaped,
    "expand_dims": _reshaped,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "tile": tiled,
    "dynamic_slice": _dynamic_slice,
    "split": _split,
    "concatenate": _joined("cat", "dimension"),
    "stack": _joined("stack", "axis"),
    "pad": padded,
    "rev": _rev,
    "argmax": _argmax,
    "top_k": _top_k,
    "cumsum": _cumsum,
    **{n: _called(n, "axis", "reverse") for n in RUNNING},
    **{n: _reduce_window(n) for n in WINDOWS},
    "argmin": _argmin,
    "round": _round,
    "sort": _called("sort", "dimension", "is_stable", "num_keys"),
    "cholesky": _cholesky,
    "iota": _iota,
    "dot_general": dot_general,
    "gather": gathered,
    "conv_general_dilated": conv,
    FOURIER: fourier,
}
