"""Idioms: sub-graphs that are one op of the vocabulary.

Each idiom is given by the jnp functions that a user would write. They are traced at the shapes of
the place in question, simplified like the user's program, and looked for by `match`: whatever form
jnp gives them, both sides have the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontends.jax import forms
from autopar.frontends.jax.draft import (
    Builder,
    Draft,
    Node,
    Operand,
    Shape,
    Uniform,
    Value,
    merged,
    rewrite,
)
from autopar.frontends.jax.jaxprs import draft_of
from autopar.frontends.jax.match import Matcher
from autopar.frontends.jax.simplify import simplified
from autopar.frontends.jax.vocabulary import zero_outside

Operands = Sequence[tuple[Shape, str]]
Bound = Mapping[str, Operand]


@dataclass(frozen=True, slots=True)
class Idiom:
    """``forms`` are functions of the operands; their parameter names bind what is found.

    operands: shapes and dtypes at a node that might be the result, None where it cannot be.
    build:    the ops that take its place.
    """

    forms: tuple[Callable[..., Any], ...]
    operands: Callable[[Node, Builder], Operands | None]
    build: Callable[[Node, Bound, Builder], Operand | None]


def lifted(draft: Draft) -> Draft:
    """The draft with every idiom replaced."""
    for group in GROUPS:
        draft = simplified(merged(rewrite(draft, functools.partial(_visit, group))))
    return draft


def _visit(group: Sequence[Idiom], node: Node, builder: Builder) -> Sequence[Operand] | None:
    for idiom in group:
        operands = idiom.operands(node, builder)
        if operands is None:
            continue
        for form in idiom.forms:
            template = _template(form, tuple(operands))
            binding = Matcher(template, builder.maker).match(node)
            if binding is None:
                continue
            named = zip(_names(form), template.inputs, strict=True)
            result = idiom.build(node, {n: binding[v] for n, v in named if v in binding}, builder)
            if result is not None:
                return [result]
    return None


def _names(form: Callable[..., Any]) -> tuple[str, ...]:
    return form.__code__.co_varnames[: form.__code__.co_argcount]


@functools.lru_cache(maxsize=512)
def _template(form: Callable[..., Any], operands: tuple[tuple[Shape, str], ...]) -> Draft:
    names = _names(form)
    # numbers such as eps come last and are scalars of the first operand's dtype
    given = [*operands, *[((), operands[0][1])] * (len(names) - len(operands))]
    closed = jax.make_jaxpr(form)(*(jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in given))
    return simplified(draft_of(closed, tuple(Value(s, d) for s, d in given)))


def _number(operand: Operand) -> float | None:
    return float(operand.value) if isinstance(operand, Uniform) else None


def _like_result(*kinds: str) -> Callable[[Node, Builder], Operands | None]:
    """One operand of the result's shape and dtype, where the result is made by one of ``kinds``."""

    def operands(node: Node, builder: Builder) -> Operands | None:
        if node.kind not in kinds or not node.out.shape or "float" not in node.out.dtype:
            return None
        return [(node.out.shape, node.out.dtype)]

    return operands


def _with_weight(*kinds: str) -> Callable[[Node, Builder], Operands | None]:
    def operands(node: Node, builder: Builder) -> Operands | None:
        alike = _like_result(*kinds)(node, builder)
        return None if alike is None else [*alike, (node.out.shape[-1:], node.out.dtype)]

    return operands


def _last_dim(kind: str) -> Callable[[Node, Bound, Builder], Operand]:
    def build(node: Node, bound: Bound, builder: Builder) -> Operand:
        out = node.out
        return builder.op(kind, (bound["x"],), out.shape, out.dtype, dim=len(out.shape) - 1)

    return build


def _unary(kind: str, **attrs: Any) -> Callable[[Node, Bound, Builder], Operand]:
    def build(node: Node, bound: Bound, builder: Builder) -> Operand:
        return builder.op(kind, (bound["x"],), node.out.shape, node.out.dtype, **attrs)

    return build


def _layer_norm(node: Node, bound: Bound, builder: Builder) -> Operand | None:
    eps = _number(bound["eps"]) if "eps" in bound else 0.0
    if eps is None:
        return None
    inputs = (bound["x"], bound["weight"]) if "weight" in bound else (bound["x"],)
    return builder.op("layer_norm", inputs, node.out.shape, node.out.dtype, dims=1, eps=eps)


def _rms_norm(node: Node, bound: Bound, builder: Builder) -> Operand | None:
    eps = _number(bound["eps"]) if "eps" in bound else 0.0
    if eps is None:
        return None
    attrs = {"eps": eps, "upcast": node.out.dtype in ("float16", "bfloat16"), "scale_offset": 0}
    return builder.op("rms_norm", (bound["x"],), node.out.shape, node.out.dtype, **attrs)


def _rows(*kinds: str) -> Callable[[Node, Builder], Operands | None]:
    """Operands [..., v] and [...] of a result [...]; v is read off the ops above it."""

    def operands(node: Node, builder: Builder) -> Operands | None:
        if node.kind not in kinds or not node.out.shape or "float" not in node.out.dtype:
            return None
        shape = node.out.shape
        todo, seen = list(node.values), 0
        while todo and seen < 8:
            value = todo.pop(0)
            seen += 1
            if value.shape[:-1] == shape and value.dtype == node.out.dtype and value.shape[-1] > 1:
                return [(value.shape, value.dtype), (shape, _labels_dtype(node, builder))]
            if value in builder.maker:
                todo.extend(builder.maker[value].values)
        return None

    return operands


def _rows_of_matrix(*kinds: str) -> Callable[[Node, Builder], Operands | None]:
    """`_rows` of an [n, v] operand: `x[jnp.arange(n), labels]` of more dims picks otherwise."""

    def operands(node: Node, builder: Builder) -> Operands | None:
        return _rows(*kinds)(node, builder) if len(node.out.shape) == 1 else None

    return operands


def _labels_dtype(node: Node, builder: Builder) -> str:
    """The dtype of the integers that a result was picked with."""
    todo, seen = list(node.values), 0
    while todo and seen < 64:
        value = todo.pop(0)
        seen += 1
        if value.dtype in ("int32", "int64") and value.shape:
            return value.dtype
        if value in builder.maker:
            todo.extend(builder.maker[value].values)
    return "int32"


def _picked(node: Node, bound: Bound, builder: Builder) -> Operand:
    x, labels = bound["x"], bound["labels"]
    shape = (*node.out.shape, 1)
    index = builder.reshape(labels, shape)
    picked = builder.op("gather", (x, index), shape, node.out.dtype, dim=len(shape) - 1)
    return builder.reshape(picked, node.out.shape)


def _picked_or_zero(node: Node, bound: Bound, builder: Builder) -> Operand:
    """`jax.nn.one_hot` of a label that is no class, as -100 is none, is zeros."""
    x = bound["x"]
    shape, dim = (*node.out.shape, 1), len(x.shape) - 1
    labels = builder.reshape(bound["labels"], shape)
    picked = zero_outside(x, labels, dim, builder)
    return builder.reshape(picked, node.out.shape)


def _negative_log(node: Node, bound: Bound, builder: Builder) -> Operand:
    x = bound["x"]
    dim = len(x.shape) - 1
    likelihood = builder.op("log_softmax", (x,), x.shape, node.out.dtype, dim=dim)
    picked = _picked(node, {**bound, "x": likelihood}, builder)
    return builder.op("neg", (picked,), node.out.shape, node.out.dtype)


GROUPS: tuple[tuple[Idiom, ...], ...] = (
    (
        Idiom((forms.row_of_logsumexp, forms.row_of_logsumexp_optax), _rows("sub"), _negative_log),
        Idiom((forms.pick_one_hot,), _rows("sum"), _picked_or_zero),
        Idiom((forms.pick_by_index,), _rows_of_matrix("jax::gather"), _picked),
    ),
    (
        Idiom((forms.softmax, forms.softmax_plain), _like_result("div"), _last_dim("softmax")),
        Idiom(
            (forms.log_softmax, forms.log_softmax_by_logsumexp),
            _like_result("sub"),
            _last_dim("log_softmax"),
        ),
        Idiom(
            (forms.gelu_tanh, forms.gelu_tanh_left),
            _like_result("mul"),
            _unary("gelu", approximate="tanh"),
        ),
        Idiom(
            (forms.gelu_exact, forms.gelu_erf),
            _like_result("mul"),
            _unary("gelu", approximate="none"),
        ),
        Idiom((forms.silu,), _like_result("mul"), _unary("silu")),
        Idiom(
            (
                forms.layer_norm_rsqrt,
                forms.layer_norm_sqrt,
                forms.layer_norm_fast,
                forms.layer_norm_clipped,
            ),
            _like_result("mul", "div", "cast"),
            _layer_norm,
        ),
        Idiom((forms.layer_norm_weighted, forms.layer_norm_flax), _with_weight("mul"), _layer_norm),
        Idiom(
            (forms.rms_norm_rsqrt, forms.rms_norm_sqrt),
            _like_result("mul", "div", "cast"),
            _rms_norm,
        ),
    ),
)
