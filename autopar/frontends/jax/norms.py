"""Weights and biases of norms: the multiplication and addition that follow become operands."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.frontends.jax.draft import Builder, Draft, Node, Operand, Uniform, Value, rewrite
from autopar.frontends.jax.simplify import simplified


def norms_weighted(draft: Draft) -> Draft:
    return simplified(rewrite(draft, _visit))


def _visit(node: Node, builder: Builder) -> Sequence[Operand] | None:
    if node.kind not in ("mul", "add") or not all(isinstance(x, Value) for x in node.inputs):
        return None
    for x, other in (node.inputs, node.inputs[::-1]):
        assert isinstance(x, Value)
        norm = _absorbed(node, x, other, builder)
        if norm is not None:
            return [norm]
    return None


def _absorbed(node: Node, x: Value, other: Operand, builder: Builder) -> Operand | None:
    cast = builder.made_by(x, "cast")
    norm = builder.made_by(cast.inputs[0] if cast else x, "layer_norm", "rms_norm")
    if norm is None or cast is not None or other.shape != node.out.shape[-1:]:
        return None
    if (x.shape, x.dtype) != (node.out.shape, node.out.dtype):
        return None
    if _is_own_cast(other, builder) and not _is_own_cast(norm.inputs[0], builder):
        return None  # the result has the weight's dtype
    count = len(norm.inputs)
    attrs = dict(norm.attrs)
    if node.kind == "mul" and count == 1:
        offset = builder.made_by(other, "add")
        if norm.kind == "rms_norm" and offset is not None:
            number = offset.inputs[1]
            if isinstance(number, Uniform) and number.value == 1:
                other, attrs["scale_offset"] = offset.inputs[0], 1
    elif not (node.kind == "add" and count == 2 and norm.kind == "layer_norm"):
        return None
    return builder.op(norm.kind, (*norm.inputs, other), node.out.shape, node.out.dtype, **attrs)


def _is_own_cast(x: Operand, builder: Builder) -> bool:
    node = builder.made_by(x, "cast")
    return node is not None and bool(node.attrs.get("own"))
