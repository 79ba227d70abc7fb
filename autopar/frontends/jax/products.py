"""Einsums by their usual names: linear, linear_t, matmul.

Transposes of operands disappear into the equation first. One of the result does so only where a
name is gained by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.frontends.jax.draft import Builder, Draft, Node, Operand, Value, rewrite
from autopar.frontends.jax.simplify import simplified


def products_named(draft: Draft) -> Draft:
    return simplified(rewrite(draft, _visit))


def _visit(node: Node, builder: Builder) -> Sequence[Operand] | None:
    if node.kind == "transpose":
        return _transposed(node, builder)
    if node.kind != "einsum":
        return None
    equation, operands = _absorbed(node, builder)
    named = _named(equation, operands, node.out, builder)
    if named is not None:
        return [named]
    if equation != node.attrs["equation"]:
        out = node.out
        return [builder.op("einsum", operands, out.shape, out.dtype, equation=equation)]
    return None


def _absorbed(node: Node, builder: Builder) -> tuple[str, list[Operand]]:
    """The equation over the operands before their transposes."""
    left, _, right = node.attrs["equation"].partition("->")
    terms, operands = left.split(","), list(node.inputs)
    for i, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        moved = builder.made_by(operand, "transpose")
        if moved is not None:
            letters = [""] * len(term)
            for letter, dim in zip(term, moved.attrs["dims"], strict=True):
                letters[dim] = letter
            terms[i], operands[i] = "".join(letters), moved.inputs[0]
    return f"{','.join(terms)}->{right}", operands


def _transposed(node: Node, builder: Builder) -> Sequence[Operand] | None:
    """A transpose of an einsum that has no name as it is: perhaps the whole has one."""
    inner = builder.made_by(node.inputs[0], "einsum")
    if inner is None:
        return None
    equation, operands = _absorbed(inner, builder)
    left, _, right = equation.partition("->")
    moved = "".join(right[d] for d in node.attrs["dims"])
    named = _named(f"{left}->{moved}", operands, node.out, builder)
    return None if named is None else [named]


def _named(
    equation: str, operands: Sequence[Operand], out: Value, builder: Builder
) -> Operand | None:
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != 2:
        return None
    for x, w, (a, b) in (
        (operands[0], operands[1], terms),
        (operands[1], operands[0], terms[::-1]),
    ):
        if _is_weight(w, builder) and len(b) == 2 and len(a) >= 1 and a[-1] in b:
            k = a[-1]
            n = b[0] if b[1] == k else b[1]
            if right == a[:-1] + n and n not in a:
                kind = "linear" if b == n + k else "linear_t"
                return builder.op(kind, (x, w), out.shape, out.dtype)
    a, b = terms
    lead = right[:-2]
    if len(right) >= 2 and len(a) == len(b) == len(right):
        m, n = right[-2], right[-1]
        if a[:-1] == lead + m and b == lead + a[-1] + n and a[-1] not in right:
            return builder.op("matmul", operands, out.shape, out.dtype)
    return None


def _is_weight(x: Operand, builder: Builder) -> bool:
    """Whether ``x`` is a parameter, perhaps cast."""
    while (node := builder.made_by(x, "cast", "reshape")) is not None:
        x = node.inputs[0]
    return isinstance(x, Value) and x.role == "parameter"
