"""One op as an expression over the pieces of one rank.

Shapes in the text are local. Where a plan splits what an op's attrs count (the rows of a mean, the
vocabulary of a lookup), the text says so: a global count, an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

from autopar.emit.constants import literal, number, same
from autopar.emit.implementations import arguments
from autopar.emit.jax.errors import JaxEmitError
from autopar.emit.sizes import NONE, Size, Sizes, product, slice_end
from autopar.emit.text import (
    AND,
    ATOM,
    COMPARE,
    OR,
    PRODUCT,
    SUM,
    UNARY,
    XOR,
    Expr,
    constant,
    tuple_text,
    variable,
)
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.rules.advice import unwritable
from autopar.rules.called import LIFTED, WINDOW, is_called, window_of, written
from autopar.rules.implementations.table import GLOBAL_COUNT
from autopar.rules.lax_calls import LAX_CALLS

Shape = tuple[int, ...]

OPERATORS: Mapping[str, tuple[str, int]] = {
    "add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT),
    "matmul": ("@", PRODUCT), "linear_t": ("@", PRODUCT), "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE), "lt": ("<", COMPARE), "le": ("<=", COMPARE), "gt": (">", COMPARE),
    "ge": (">=", COMPARE), "and": ("&", AND), "or": ("|", OR), "xor": ("^", XOR),
}  # fmt: skip
CALLS: Mapping[str, str] = {
    "pow": "jnp.power", "maximum": "jnp.maximum", "minimum": "jnp.minimum", "exp": "jnp.exp",
    "log": "jnp.log", "sqrt": "jnp.sqrt", "rsqrt": "lax.rsqrt", "tanh": "jnp.tanh",
    "sigmoid": "jax.nn.sigmoid", "relu": "jax.nn.relu", "silu": "jax.nn.silu",
    "softplus": "jax.nn.softplus", "sin": "jnp.sin", "cos": "jnp.cos", "abs": "jnp.abs",
    "not": "jnp.logical_not", "erf": "lax.erf", "square": "jnp.square", "sign": "jnp.sign",
    "floor": "jnp.floor", "detach": "lax.stop_gradient", "linear": "linear",
    "grouped_linear": "grouped_linear",
    "jax::rem": "jnp.fmod", "jax::is_finite": "jnp.isfinite", "jax::rint": "jnp.rint",
}  # fmt: skip
REDUCTIONS: Mapping[str, str] = {
    "sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "any": "any", "all": "all",
}  # fmt: skip


def expression(
    op: LoweredOp, inputs: Sequence[Expr], lowered: Lowered, sizes: Sizes = NONE
) -> Expr:
    """The op applied to ``inputs``. Raises `JaxEmitError` for what has no JAX form."""
    return _Writer(op, inputs, lowered, sizes).write()


class _Writer:
    def __init__(
        self, op: LoweredOp, inputs: Sequence[Expr], lowered: Lowered, sizes: Sizes
    ) -> None:
        self.op = op.op
        self.lowered = lowered
        self.x = inputs
        self.attrs = op.op.attrs
        self.result = sizes.local(lowered, op.op.name, op.results[0])
        self.global_operands = [sizes.whole(lowered, o.name) for o in op.operands]
        self.operands = [sizes.local(lowered, o.name, o.wanted) for o in op.operands]
        self.beside = arguments(op, "jax", self.global_operands.__getitem__, lowered.order)
        self.counts_globally = GLOBAL_COUNT in op.implementations

    def write(self) -> Expr:
        kind = self.op.kind
        if kind in OPERATORS:
            return self._operator(*OPERATORS[kind])
        if kind in CALLS:
            return self.call(CALLS[kind], *self._pair())
        if kind in REDUCTIONS:
            return self._reduction(REDUCTIONS[kind])
        writer = _called if is_called(self.op) else WRITERS.get(kind)
        if writer is None and kind.startswith("jax::"):
            return self._primitive(kind.removeprefix("jax::"))
        if writer is None:
            raise JaxEmitError(
                f"op {kind!r} at {self.op.source} has no JAX form: write it with the ops of "
                "jnp that autopar knows"
            )
        return writer(self)

    def call(self, function: str, *arguments: str) -> Expr:
        return Expr(f"{function}({', '.join(arguments)})", ATOM, weight=self.weight)

    def method(self, name: str, *arguments: str) -> Expr:
        return Expr(f"{self.x[0].atom}.{name}({', '.join(arguments)})", ATOM, weight=self.weight)

    @property
    def weight(self) -> int:
        return 1 + max((x.weight for x in self.x), default=0)

    def given(self, position: int = 0) -> str:
        return self.x[position].text

    def all_given(self) -> list[str]:
        return [x.text for x in self.x]

    def dtype(self, name: str = "dtype") -> str:
        dtype = str(self.attrs[name])
        return LIFTED.get(dtype) or literal(dtype)

    def _pair(self) -> list[str]:
        """The operands, with the number where the op has one."""
        if "other" not in self.attrs:
            return self.all_given()
        pair = [self.given(), number(self.attrs["other"])]
        return pair[::-1] if self.attrs.get("scalar_first") else pair

    def _operator(self, sign: str, level: int) -> Expr:
        sides = list(self.x)
        if "other" in self.attrs:
            sides.append(constant(self.attrs["other"]))
            if self.attrs.get("scalar_first"):
                sides.reverse()
        left, right = sides
        # `(a * b) @ c`: products of numbers and of matrices bind alike, and read otherwise;
        # `(a < b) == c`: without them Python compares b with both.
        left_level = UNARY if sign == "@" else level + (level == COMPARE)
        text = f"{left.within(left_level)} {sign} {right.within(level + 1)}"
        return Expr(text, level, weight=self.weight)

    @property
    def whole_dtype(self) -> str:
        """Of whole numbers, which jnp would widen where 64 bits are allowed, as where a program is
        verified: only what was captured fits what it meets. Nothing of others."""
        dtype = self.lowered.graph.tensors[self.op.outputs[0]].dtype
        return literal(dtype) if dtype.startswith(("int", "uint")) else ""

    def _reduction(self, name: str) -> Expr:
        dims = self.attrs["dims"]
        rank = len(self.operands[0])
        arguments = [] if len(dims) == rank else [literal(dims[0] if len(dims) == 1 else dims)]
        if self.attrs["keepdim"]:
            arguments.append("keepdims=True")
        if name == "sum" and self.whole_dtype:
            arguments.append(f"dtype={self.whole_dtype}")
        if self.counts_globally:
            count = product(self.global_operands[0][d] for d in dims)
            total = self.method("sum", *arguments)
            divisor = count.factor if isinstance(count, Size) else count
            return Expr(f"{total.text} / {divisor}", PRODUCT, weight=self.weight)
        return self.method(name, *arguments)

    def _primitive(self, name: str) -> Expr:
        """A primitive outside of the vocabulary that only has operands."""
        why = unwritable(self.op)
        if why:
            raise JaxEmitError(
                f"autopar cannot write primitive {name!r} at {self.op.source} again, since {why}: "
                "use jnp functions that it knows"
            )
        return self.call(f"lax.{name}", *self.all_given())


def _embedding(w: _Writer) -> Expr:
    return w.call("embedding", *w.all_given(), *w.beside)


def _cross_entropy(w: _Writer) -> Expr:
    count = w.global_operands[1][0] if w.attrs["reduction"] == "mean" else 1
    zero = ["zero_outside=True"] if w.attrs.get("zero_outside") else []
    return w.call("cross_entropy", *w.all_given(), f"count={count}", *w.beside, *zero)


def _layer_norm(w: _Writer) -> Expr:
    dims = [] if w.attrs["dims"] == 1 else [f"dims={w.attrs['dims']}"]
    return w.call("layer_norm", *w.all_given(), *dims, f"eps={literal(w.attrs['eps'])}")


def _rms_norm(w: _Writer) -> Expr:
    extra = [f"eps={literal(w.attrs['eps'])}"]
    extra += ["upcast=True"] if w.attrs["upcast"] else []
    extra += [f"scale_offset={literal(w.attrs['scale_offset'])}"] if w.attrs["scale_offset"] else []
    return w.call("rms_norm", *w.all_given(), *extra)


def _attention(w: _Writer) -> Expr:
    extra = ["causal=True"] if w.attrs["causal"] else []
    scale = w.attrs["scale"]
    if scale is not None and not math.isclose(scale, w.operands[0][-1] ** -0.5):
        extra.append(f"scale={number(scale)}")
    around = any(argument.startswith("ring=") for argument in w.beside)
    function = "ring_attention" if around else "attention"
    return w.call(function, *w.all_given(), *extra, *w.beside)


def _conv(w: _Writer) -> Expr:
    plain = {"stride": {1}, "padding": {(0, 0)}, "dilation": {1}}
    options = [f"{n}={literal(w.attrs[n])}" for n, value in plain.items() if {*w.attrs[n]} != value]
    if w.attrs["groups"] > 1:
        # Channels of this rank over channels of one group: right for split groups too.
        groups = w.operands[0][1] // w.operands[1][1]
        options += [f"groups={groups}"] if groups > 1 else []
    return w.call("conv", *w.all_given(), *options)


def _where(w: _Writer) -> Expr:
    rest = w.all_given()[1:]
    sides = [number(w.attrs[n]) if w.attrs.get(n) is not None else rest.pop(0) for n in "ab"]
    return w.call("jnp.where", w.given(), *sides)


def _slice(w: _Writer) -> Expr:
    dim, step, start, stop = (w.attrs[name] for name in ("dim", "step", "start", "stop"))
    if start == 0 and step == 1 and stop == w.result[dim]:
        stop = w.result[dim]
    end = slice_end(stop, w.operands[0][dim])
    cuts = [":"] * dim + [f"{start or ''}:{end}" + (f":{step}" * (step != 1))]
    return Expr(f"{w.x[0].atom}[{', '.join(cuts)}]", ATOM, weight=w.weight)


def _select(w: _Writer) -> Expr:
    cuts = [":"] * w.attrs["dim"] + [str(w.attrs["index"])]
    return Expr(f"{w.x[0].atom}[{', '.join(cuts)}]", ATOM, weight=w.weight)


def _split(w: _Writer) -> Expr:
    sizes = w.attrs["sizes"]
    cuts = tuple(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))
    return w.call("jnp.split", w.given(), tuple_text(cuts), f"axis={w.attrs['dim']}")


def _top_k(w: _Writer) -> Expr:
    last = w.attrs["dim"] == len(w.operands[0]) - 1
    extra = [] if last else [f"axis={w.attrs['dim']}"]
    return w.call("lax.top_k", w.given(), str(w.attrs["k"]), *extra)


def _lax_call(w: _Writer) -> Expr:
    call = LAX_CALLS[w.op.kind]
    given = w.all_given()
    if call.together and len(given) > 1:
        given = [f"({', '.join(given)})"]
    options = [f"{name}={literal(value)}" for name, value in call.options(w.attrs).items()]
    return w.call(call.function, *given, *call.behind, *options)


def _called(w: _Writer) -> Expr:
    """A primitive without a kind, by the text that it has."""
    window = tuple_text(window_of(w.op, w.operands[0])) if WINDOW in w.attrs else ""
    dtypes = {name: name for name in LIFTED.values()}
    text = written(w.op, w.all_given(), dtypes, window, tuple_text(w.result))
    return Expr(text, ATOM, weight=w.weight)


def _joined(function: str) -> Callable[[_Writer], Expr]:
    def write(w: _Writer) -> Expr:
        return w.call(function, f"[{', '.join(w.all_given())}]", f"axis={w.attrs['dim']}")

    return write


def _pad(w: _Writer) -> Expr:
    value = w.attrs["value"]
    filled = [] if same(value, 0) else [f"constant_values={number(value)}"]
    return w.call("jnp.pad", w.given(), tuple_text(w.attrs["low_high"]), *filled)


def _neg(w: _Writer) -> Expr:
    return Expr(f"-{w.x[0].within(UNARY)}", UNARY, weight=w.weight)


def _over(function: str) -> Callable[[_Writer], Expr]:
    return lambda w: w.call(function, *w.all_given(), f"axis={w.attrs['dim']}")


def _argmax(w: _Writer) -> Expr:
    place = f"jnp.argmax({w.given()}, axis={w.attrs['dim']})"
    return Expr(f"{place}.astype({w.whole_dtype})", ATOM, weight=w.weight)


def _cumsum(w: _Writer) -> Expr:
    dtype = [f"dtype={w.whole_dtype}"] if w.whole_dtype else []
    return w.call("jnp.cumsum", w.given(), f"axis={w.attrs['dim']}", *dtype)


def _numbers(w: _Writer) -> str:
    return ", ".join(map(str, w.result))


def _experts(w: _Writer) -> Expr:
    """``experts(x, index, weights, gate, up, down, between=lambda gate, up: ...)``"""
    names = ("h",) if w.attrs["reads"] == "all" else ("gate", "up")
    values = [variable(name) for name in names]
    for kind, operands, attrs in w.attrs["gate"]:
        step = copy(w)
        step.op = replace(w.op, kind=kind, attrs=attrs)
        step.attrs, step.x = attrs, [values[i] for i in operands]
        values.append(step.write())
    between = f"between=(lambda {', '.join(names)}: {values[-1].text})"
    return w.call("experts", *w.all_given(), between, *w.beside)


WRITERS: Mapping[str, Callable[[_Writer], Expr]] = {
    "neg": _neg,
    "identity": lambda w: w.x[0],
    "embedding": _embedding,
    "experts": _experts,
    "cross_entropy": _cross_entropy,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "attention": _attention,
    "conv": _conv,
    "einsum": lambda w: w.call("jnp.einsum", literal(w.attrs["equation"]), *w.all_given()),
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


def _range(w: _Writer) -> list[str]:
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
