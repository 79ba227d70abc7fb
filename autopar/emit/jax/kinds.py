"""Expressions of ops by kind: calls of jnp, of lax and of the runtime, with their options.

Each is a function of where the op stands (`Site`). What is a sign between operands, or a call of
them alone, is a row of a table in `autopar.emit.jax.expressions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autopar.emit.constants import literal, number, same
from autopar.emit.jax.site import Site
from autopar.emit.sizes import slice_end
from autopar.emit.text import ATOM, UNARY, Expr, tuple_text
from autopar.rules.lax_calls import LAX_CALLS


def _embedding(w: Site) -> Expr:
    return w.call("embedding", *w.all_given(), *w.beside)


def _cross_entropy(w: Site) -> Expr:
    count = w.global_operands[1][0] if w.attrs["reduction"] == "mean" else 1
    zero = ["zero_outside=True"] if w.attrs.get("zero_outside") else []
    return w.call("cross_entropy", *w.all_given(), f"count={count}", *w.beside, *zero)


def _linear_cross_entropy(w: Site) -> Expr:
    count = w.global_operands[1][0] if w.attrs["reduction"] == "mean" else 1
    given = [f"count={count}", f"chunks={w.attrs['chunks']}"]
    given += [f"scale={number(w.attrs['scale'])}"] if w.attrs["scale"] != 1.0 else []
    given += [f"cap={number(w.attrs['cap'])}"] if w.attrs["cap"] is not None else []
    zero = [f"{name}=True" for name in ("zero_outside", "wide") if w.attrs.get(name)]
    x, labels, weight, *bias = w.all_given()
    if w.attrs.get("transposed"):
        weight = f"{w.x[2].atom}.T"
    return w.call("linear_cross_entropy", x, labels, weight, *bias, *given, *w.beside, *zero)


def _layer_norm(w: Site) -> Expr:
    dims = [] if w.attrs["dims"] == 1 else [f"dims={w.attrs['dims']}"]
    return w.call("layer_norm", *w.all_given(), *dims, f"eps={literal(w.attrs['eps'])}")


def _rms_norm(w: Site) -> Expr:
    extra = [f"eps={literal(w.attrs['eps'])}"]
    extra += ["upcast=True"] if w.attrs["upcast"] else []
    extra += [f"scale_offset={literal(w.attrs['scale_offset'])}"] if w.attrs["scale_offset"] else []
    return w.call("rms_norm", *w.all_given(), *extra)


def _attention(w: Site) -> Expr:
    extra = ["causal=True"] if w.attrs["causal"] else []
    extra += [f"window={w.attrs['window']}"] if "window" in w.attrs else []
    scale = w.attrs["scale"]
    if scale is not None and not math.isclose(scale, w.operands[0][-1] ** -0.5):
        extra.append(f"scale={number(scale)}")
    around = any(argument.startswith("ring=") for argument in w.beside)
    function = "ring_attention" if around else "attention"
    return w.call(function, *w.all_given(), *extra, *w.beside)


def _conv(w: Site) -> Expr:
    plain = {"stride": {1}, "padding": {(0, 0)}, "dilation": {1}}
    options = [f"{n}={literal(w.attrs[n])}" for n, value in plain.items() if {*w.attrs[n]} != value]
    if w.attrs["groups"] > 1:
        # Channels of this rank over channels of one group: right for split groups too.
        groups = w.operands[0][1] // w.operands[1][1]
        options += [f"groups={groups}"] if groups > 1 else []
    return w.call("conv", *w.all_given(), *options, *w.preferred)


def _where(w: Site) -> Expr:
    rest = w.all_given()[1:]
    numbers = {n: w.constant(w.attrs[n]).text for n in "ab" if w.attrs.get(n) is not None}
    sides = [numbers[n] if n in numbers else rest.pop(0) for n in "ab"]
    return w.call("jnp.where", w.given(), *sides)


def _slice(w: Site) -> Expr:
    dim, step, start, stop = (w.attrs[name] for name in ("dim", "step", "start", "stop"))
    if start == 0 and step == 1 and stop == w.result[dim]:
        stop = w.result[dim]
    end = slice_end(stop, w.operands[0][dim])
    cuts = [":"] * dim + [f"{start or ''}:{end}" + (f":{step}" * (step != 1))]
    return Expr(f"{w.x[0].atom}[{', '.join(cuts)}]", ATOM, weight=w.weight)


def _select(w: Site) -> Expr:
    cuts = [":"] * w.attrs["dim"] + [str(w.attrs["index"])]
    return Expr(f"{w.x[0].atom}[{', '.join(cuts)}]", ATOM, weight=w.weight)


def _split(w: Site) -> Expr:
    sizes = w.attrs["sizes"]
    cuts = tuple(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))
    return w.call("jnp.split", w.given(), tuple_text(cuts), f"axis={w.attrs['dim']}")


def _top_k(w: Site) -> Expr:
    last = w.attrs["dim"] == len(w.operands[0]) - 1
    extra = [] if last else [f"axis={w.attrs['dim']}"]
    return w.call("lax.top_k", w.given(), str(w.attrs["k"]), *extra)


def _lax_call(w: Site) -> Expr:
    call = LAX_CALLS[w.op.kind]
    given = w.all_given()
    if call.together and len(given) > 1:
        given = [f"({', '.join(given)})"]
    options = [f"{name}={literal(value)}" for name, value in call.options(w.attrs).items()]
    return w.call(call.function, *given, *call.behind, *options)


def _joined(function: str) -> Callable[[Site], Expr]:
    def write(w: Site) -> Expr:
        return w.call(function, f"[{', '.join(w.all_given())}]", f"axis={w.attrs['dim']}")

    return write


def _pad(w: Site) -> Expr:
    value = w.attrs["value"]
    filled = [] if same(value, 0) else [f"constant_values={w.constant(value).text}"]
    return w.call("jnp.pad", w.given(), tuple_text(w.attrs["low_high"]), *filled)


def _neg(w: Site) -> Expr:
    return Expr(f"-{w.x[0].within(UNARY)}", UNARY, weight=w.weight)


def _over(function: str) -> Callable[[Site], Expr]:
    return lambda w: w.call(function, *w.all_given(), f"axis={w.attrs['dim']}")


def _argmax(w: Site) -> Expr:
    place = f"jnp.argmax({w.given()}, axis={w.attrs['dim']})"
    return Expr(f"{place}.astype({w.whole_dtype})", ATOM, weight=w.weight)


def _cumsum(w: Site) -> Expr:
    dtype = [f"dtype={w.whole_dtype}"] if w.whole_dtype else []
    return w.call("jnp.cumsum", w.given(), f"axis={w.attrs['dim']}", *dtype)


def _numbers(w: Site) -> str:
    return ", ".join(map(str, w.result))


WRITERS: Mapping[str, Callable[[Site], Expr]] = {
    "neg": _neg,
    "identity": lambda w: w.x[0],
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "attention": _attention,
    "conv": _conv,
    "einsum": lambda w: w.call(
        "jnp.einsum", literal(w.attrs["equation"]), *w.all_given(), *w.preferred
    ),
    "softmax": _over("jax.nn.softmax"),
    "log_softmax": _over("jax.nn.log_softmax"),
    "gather": _over("jnp.take_along_axis"),
    "index_select": _over("jnp.take"),
    "argmax": _argmax,
    "cumsum": _cumsum,
    "jax::top_k": _top_k,
    **dict.fromkeys(LAX_CALLS, _lax_call),
    "gelu": lambda w: w.call(
        "jax.nn.gelu", w.given(), f"approximate={w.attrs['approximate'] == 'tanh'}"
    ),
    "clamp": lambda w: w.call("clamp", w.given(), number(w.attrs["min"]), number(w.attrs["max"])),
    "cast": lambda w: w.method("astype", w.dtype()),
    "where": _where,
    "reshape": lambda w: w.method("reshape", _numbers(w) or "()"),
    "transpose": lambda w: w.method("transpose", ", ".join(map(str, w.attrs["dims"]))),
    "expand": lambda w: w.call("jnp.broadcast_to", w.given(), tuple_text(w.result)),
    "slice": _slice,
    "select": _select,
    "split": _split,
    "cat": _joined("jnp.concatenate"),
    "stack": _joined("jnp.stack"),
    "pad": _pad,
    "flip": lambda w: w.call("jnp.flip", w.given(), literal(w.attrs["dims"])),
    "full": lambda w: w.call("jnp.full", tuple_text(w.result), number(w.attrs["value"]), w.dtype()),
    "arange": lambda w: w.call("jnp.arange", *_range(w), f"dtype={w.dtype()}"),
    "constant": lambda w: w.call("jnp.array", _nested(w.attrs["value"]), w.dtype()),
}


def _range(w: Site) -> list[str]:
    """The arguments of a range without those that are what they are by default."""
    start, stop, step = (w.attrs[name] for name in ("start", "stop", "step"))
    if stop == w.result[0]:
        stop = w.result[0]
    if step != 1:
        return [literal(start), literal(stop), literal(step)]
    return [literal(start), literal(stop)] if start else [literal(stop)]


def _nested(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_nested, value))}]"
    return literal(value)
