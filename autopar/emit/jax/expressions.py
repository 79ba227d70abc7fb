"""One op as an expression over the pieces of one rank.

Shapes in the text are local. Where a plan splits what an op's attrs count (the rows of a mean, the
vocabulary of a lookup), the text says so: a global count, an axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.emit.constants import literal
from autopar.emit.jax.errors import JaxEmitError
from autopar.emit.jax.kinds import WRITERS
from autopar.emit.jax.site import Site, site_of
from autopar.emit.sizes import NONE, Size, Sizes, product
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
    tuple_text,
    variable,
)
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.rules.advice import unwritable
from autopar.rules.called import LIFTED, WINDOW, is_called, window_of, written

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
    "erf": "lax.erf", "square": "jnp.square", "sign": "jnp.sign",
    "floor": "jnp.floor", "detach": "lax.stop_gradient", "linear": "linear",
    "grouped_linear": "grouped_linear",
    "jax::rem": "jnp.fmod", "jax::is_finite": "jnp.isfinite", "jax::rint": "jnp.rint",
}  # fmt: skip
PRODUCTS = {"linear": "linear", "linear_t": "jnp.matmul", "matmul": "jnp.matmul"}
"""Where the result is wider than what is multiplied."""
REDUCTIONS: Mapping[str, str] = {
    "sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "any": "any", "all": "all",
}  # fmt: skip


def expression(
    op: LoweredOp, inputs: Sequence[Expr], lowered: Lowered, sizes: Sizes = NONE
) -> Expr:
    """The op applied to ``inputs``. Raises `JaxEmitError` for what has no JAX form."""
    return _write(site_of(op, inputs, lowered, sizes))


def _write(w: Site) -> Expr:
    kind = w.op.kind
    if kind in PRODUCTS and w.preferred:
        return w.call(PRODUCTS[kind], *w.all_given(), *w.preferred)
    if kind in OPERATORS:
        return _operator(w, *OPERATORS[kind])
    if kind == "not":  # of whole numbers that of their bits
        truths = w.lowered.graph.tensors[w.op.inputs[0]].dtype == "bool"
        return w.call("jnp.logical_not" if truths else "jnp.invert", *w.all_given())
    if kind in CALLS:
        return w.call(CALLS[kind], *_pair(w))
    if kind in REDUCTIONS:
        return _reduction(w, REDUCTIONS[kind])
    if is_called(w.op):
        return _called(w)
    if kind == "experts":
        return _experts(w)
    writer = WRITERS.get(kind)
    if writer is None and kind.startswith("jax::"):
        return _primitive(w, kind.removeprefix("jax::"))
    if writer is None:
        raise JaxEmitError(
            f"op {kind!r} at {w.op.source} has no JAX form: write it with the ops of "
            "jnp that autopar knows"
        )
    return writer(w)


def _pair(w: Site) -> list[str]:
    """The operands, with the number where the op has one."""
    if "other" not in w.attrs:
        return w.all_given()
    pair = [w.given(), w.constant(w.attrs["other"]).text]
    return pair[::-1] if w.attrs.get("scalar_first") else pair


def _operator(w: Site, sign: str, level: int) -> Expr:
    sides = list(w.x)
    if "other" in w.attrs:
        sides.append(w.constant(w.attrs["other"]))
        if w.attrs.get("scalar_first"):
            sides.reverse()
    left, right = sides
    # `(a * b) @ c`: products of numbers and of matrices bind alike, and read otherwise;
    # `(a < b) == c`: without them Python compares b with both.
    left_level = UNARY if sign == "@" else level + (level == COMPARE)
    text = f"{left.within(left_level)} {sign} {right.within(level + 1)}"
    return Expr(text, level, weight=w.weight)


def _reduction(w: Site, name: str) -> Expr:
    dims = w.attrs["dims"]
    rank = len(w.operands[0])
    arguments = [] if len(dims) == rank else [literal(dims[0] if len(dims) == 1 else dims)]
    if w.attrs["keepdim"]:
        arguments.append("keepdims=True")
    if name == "sum" and w.whole_dtype:
        arguments.append(f"dtype={w.whole_dtype}")
    if w.counts_globally:
        count = product(w.global_operands[0][d] for d in dims)
        total = w.method("sum", *arguments)
        divisor = count.factor if isinstance(count, Size) else count
        return Expr(f"{total.text} / {divisor}", PRODUCT, weight=w.weight)
    return w.method(name, *arguments)


def _primitive(w: Site, name: str) -> Expr:
    """A primitive outside of the vocabulary that only has operands."""
    why = unwritable(w.op)
    if why:
        raise JaxEmitError(
            f"autopar cannot write primitive {name!r} at {w.op.source} again, since {why}: "
            "use jnp functions that it knows"
        )
    return w.call(f"lax.{name}", *w.all_given())


def _called(w: Site) -> Expr:
    """A primitive without a kind, by the text that it has."""
    window = tuple_text(window_of(w.op, w.operands[0])) if WINDOW in w.attrs else ""
    dtypes = {name: name for name in LIFTED.values()}
    text = written(w.op, w.all_given(), dtypes, window, tuple_text(w.result))
    return Expr(text, ATOM, weight=w.weight)


def _experts(w: Site) -> Expr:
    """``experts(x, index, weights, gate, up, down, between=lambda gate, up: ...)``"""
    names = ("h",) if w.attrs["reads"] == "all" else ("gate", "up")
    values = [variable(name) for name in names]
    for kind, operands, attrs in w.attrs["gate"]:
        op = replace(w.op, kind=kind, attrs=attrs)
        values.append(_write(replace(w, op=op, x=[values[i] for i in operands])))
    between = f"between=(lambda {', '.join(names)}: {values[-1].text})"
    return w.call("experts", *w.all_given(), between, *w.beside)
