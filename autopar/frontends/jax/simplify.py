"""Local rewritings that bring the many ways of writing one thing to one form.

They run on the user's program and on the templates of `idioms` alike, so a template matches however
either was written.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.frontends.jax import views
from autopar.frontends.jax.draft import (
    Builder,
    Draft,
    Node,
    Operand,
    Uniform,
    Value,
    broadcast,
    merged,
    rewrite,
)


def _rem(a: Any, b: Any) -> Any:
    """What is left of ``a`` when divided by ``b``, with the sign of ``a``."""
    left = abs(a) % abs(b)
    return -left if a < 0 else left


BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "pow": operator.pow, "maximum": max, "minimum": min, "eq": operator.eq, "ne": operator.ne,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "jax::rem": _rem,
}  # fmt: skip
UNARY: Mapping[str, Callable[[Any], Any]] = {
    "neg": operator.neg, "exp": math.exp, "log": math.log, "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x), "square": lambda x: x * x, "abs": abs,
    "detach": lambda x: x, "tanh": math.tanh, "sin": math.sin, "cos": math.cos,
    "jax::is_finite": math.isfinite,
}  # fmt: skip
ELEMENTWISE = frozenset(
    (*BINARY, *UNARY, "where", "sigmoid", "not", "erf", "sign", "floor", "cast",
     "jax::erfc", "relu", "gelu", "silu", "softplus", "clamp")
)  # fmt: skip
COMMUTATIVE = frozenset(("add", "mul", "maximum", "minimum", "eq", "ne", "and", "or", "xor"))
REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "any", "all"))


def simplified(draft: Draft) -> Draft:
    """The draft in its one form; applied until nothing changes."""
    while True:
        before = _size(draft)
        draft = merged(rewrite(draft, _visit))
        if _size(draft) == before:
            return draft


def _size(draft: Draft) -> tuple[Any, ...]:
    return tuple(
        (node.kind, len(node.values), _size(node.attrs["body"]) if node.kind == "scan" else 0)
        for node in draft.nodes
    )


def _visit(node: Node, builder: Builder) -> Sequence[Operand] | None:
    if node.kind in ELEMENTWISE:
        simpler = folded(node) or _neutral(node, builder) or _mean(node, builder)
        simpler = simpler or _reduced_as_viewed(node, builder)
        if simpler is not None:
            return [simpler]
        return _broadcasting(node, builder)
    if node.kind == "expand":
        return _same_shape(node)
    if node.kind in ("reshape", "transpose"):
        return _same_shape(node) or _keepdim(node, builder) or views.shortened(node, builder)
    return None


def folded(node: Node) -> Uniform | None:
    """Arithmetic on plain numbers; None for all else."""
    if not all(isinstance(x, Uniform) for x in node.inputs):
        return None
    numbers = [x.value for x in node.inputs if isinstance(x, Uniform)]
    table: Mapping[str, Callable[..., Any]] = BINARY if len(numbers) == 2 else UNARY
    if node.kind == "where":
        value = numbers[1] if numbers[0] else numbers[2]
    elif node.kind == "not":
        value = ~int(numbers[0]) if "int" in node.out.dtype else not numbers[0]
    elif node.kind in table:
        try:
            value = table[node.kind](*numbers)
        except (ArithmeticError, ValueError):
            return None  # log(0), 1/0: left for the run, where they are inf or nan
    else:
        return None
    if not _is_of(value, node.out.dtype):
        return None
    return Uniform(value, node.out.dtype, node.out.shape)


def _is_of(value: Any, dtype: str) -> bool:
    """Whether Python's number is one of that dtype: no root of a negative one, which is complex,
    and no integer that is too large, where those of arrays begin anew."""
    if isinstance(value, complex):
        return False
    return "int" not in dtype or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max


def _neutral(node: Node, builder: Builder) -> Operand | None:
    """Ops that change nothing: ``x + 0``, ``x * 1``, ``max(x, -inf)``, ``where(c, T, F)``."""
    out = node.out

    def unchanged(x: Operand) -> Operand | None:
        if x.dtype != out.dtype:
            return None
        rank = (1,) * (len(out.shape) - len(x.shape)) + x.shape
        return builder.expand(builder.reshape(x, rank), out.shape)

    if node.kind == "where":
        condition, a, b = node.inputs
        if isinstance(condition, Uniform):
            return unchanged(a if condition.value else b)
        if isinstance(a, Uniform) and isinstance(b, Uniform) and out.dtype == "bool":
            if a.value and not b.value:
                return unchanged(condition)
            if a.value == b.value:
                return replace(a, shape=out.shape)
        return None
    if node.kind == "cast":
        return None if node.attrs.get("own") else unchanged(node.inputs[0])
    if node.kind == "neg":
        inner = builder.made_by(node.inputs[0], "neg")
        return inner.inputs[0] if inner else None
    if len(node.inputs) != 2:
        return None
    left, right = node.inputs
    for number, x, first in ((right, left, False), (left, right, True)):
        if not isinstance(number, Uniform) or (first and node.kind not in COMMUTATIVE):
            continue
        value = number.value
        nothing = (
            (node.kind in ("add", "sub") and value == 0)
            or (node.kind in ("mul", "div") and value == 1)
            or (node.kind == "maximum" and value == -math.inf)
            or (node.kind == "and" and value is True)
            or (node.kind == "or" and value is False)
        )
        if nothing:
            return unchanged(x)
    return None


def _mean(node: Node, builder: Builder) -> Operand | None:
    """A sum divided by its count is a mean."""
    if node.kind not in ("div", "mul") or not isinstance(node.inputs[-1], Uniform):
        return None
    total = builder.made_by(node.inputs[0], "sum")
    if total is None or not node.out.dtype.startswith(("float", "bfloat")):
        return None
    (x,) = total.inputs
    count = math.prod(x.shape[d] for d in total.attrs["dims"])
    number = node.inputs[-1].value
    divided = number if node.kind == "div" else 1 / number if number else 0
    if not math.isclose(divided, count, rel_tol=1e-6):
        return None
    return builder.op("mean", (x,), node.out.shape, node.out.dtype, **total.attrs)


def _broadcasting(node: Node, builder: Builder) -> Sequence[Operand] | None:
    """Operands without the expands and leading ones that broadcasting makes superfluous; squares
    by their own name; a number of a commutative op on the right."""
    kind, inputs = node.kind, list(node.inputs)
    if kind == "mul" and inputs[0] is inputs[1]:
        return [builder.op("square", inputs[:1], node.out.shape, node.out.dtype)]
    if kind == "pow" and isinstance(inputs[1], Uniform) and inputs[1].value == 2:
        return [builder.op("square", inputs[:1], node.out.shape, node.out.dtype)]
    if kind in COMMUTATIVE and isinstance(inputs[0], Uniform) and isinstance(inputs[1], Value):
        inputs.reverse()
    for i, operand in enumerate(inputs):
        while True:
            thinner = _thinner(inputs[i], builder)
            if thinner is None:
                break
            shapes = [thinner.shape if j == i else x.shape for j, x in enumerate(inputs)]
            values = [isinstance(x, Value) for x in inputs]
            given = [s for s, v in zip(shapes, values, strict=True) if v]
            if broadcast(*given) != node.out.shape:
                break
            inputs[i] = thinner
        del operand
    if tuple(inputs) == node.inputs:
        return None
    out = replace(node.out)
    builder.append(replace(node, inputs=tuple(inputs), outputs=(out,)))
    return [out]


def _thinner(x: Operand, builder: Builder) -> Value | None:
    """``x`` before an expand, or before a reshape that only put ones in front."""
    node = builder.made_by(x, "expand", "reshape")
    if node is None or not isinstance(node.inputs[0], Value):
        return None
    inner = node.inputs[0]
    if node.kind == "expand":
        return inner
    extra = len(node.out.shape) - len(inner.shape)
    front = extra > 0 and node.out.shape[:extra] == (1,) * extra
    return inner if front and node.out.shape[extra:] == inner.shape else None


def _same_shape(node: Node) -> Sequence[Operand] | None:
    (x,) = node.inputs
    if node.kind == "transpose":
        same = tuple(node.attrs["dims"]) == tuple(range(len(node.out.shape)))
        return [x] if same else None
    return [x] if x.shape == node.out.shape else None


def _keepdim(node: Node, builder: Builder) -> Sequence[Operand] | None:
    """A reduction whose dims a reshape puts back as ones keeps them."""
    reduction = builder.made_by(node.inputs[0], *REDUCTIONS)
    if reduction is None or node.kind != "reshape" or reduction.attrs["keepdim"]:
        return None
    (x,) = reduction.inputs
    dims = reduction.attrs["dims"]
    if tuple(1 if d in dims else n for d, n in enumerate(x.shape)) != node.out.shape:
        return None
    attrs = {**reduction.attrs, "keepdim": True}
    return [builder.op(reduction.kind, (x,), node.out.shape, node.out.dtype, **attrs)]


def _reduced_as_viewed(node: Node, builder: Builder) -> Operand | None:
    """A difference of a view and of what was reduced before it: `vmap` has a softmax so. The view
    is reduced then, which keeps its dims."""
    if node.kind != "sub" or not all(isinstance(x, Value) for x in node.inputs):
        return None
    x, reduced = node.inputs
    view = builder.made_by(x, *views.VIEWS)
    chain: list[Node] = []
    while (step := builder.made_by(reduced, "detach", *views.VIEWS)) is not None:
        chain.insert(0, step)
        reduced = step.inputs[0]
    reduction = builder.made_by(reduced, *REDUCTIONS)
    if view is None or reduction is None or reduction.inputs != view.inputs:
        return None
    if len(node.inputs[1].shape) != len(x.shape):
        return None
    moved = [s for s in chain if s.kind != "detach"]
    kept = tuple(1 if m == 1 else n for n, m in zip(x.shape, node.inputs[1].shape, strict=True))
    dims = tuple(d for d, (n, m) in enumerate(zip(x.shape, kept, strict=True)) if n != m)
    if kept != node.inputs[1].shape or not views.same_as_reduced(view, reduction, moved):
        return None
    attrs = {**reduction.attrs, "dims": dims, "keepdim": True}
    again: Operand = builder.op(reduction.kind, (x,), kept, reduction.out.dtype, **attrs)
    if len(moved) < len(chain):
        again = builder.op("detach", (again,), kept, again.dtype)
    return builder.op("sub", (x, again), node.out.shape, node.out.dtype)
