"""Experts as one op: products by group with a gate between them, weighted and added for a token.

What `autopar.frontends.jax.sorted_rows` leaves of sorted experts are products of rows, in place:

    rows = repeat(x, k)                              [n, d] -> [n k, d]
    h = gate(grouped(rows, e, w1), grouped(rows, e, w2))
    y = einsum("nkd,nk->nd", grouped(h, e, w3), weights)

As the op ``experts`` ranks may have experts of their own (`autopar.rules.experts`). Where anything
else is done to the rows, products stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.frontends.jax.draft import Builder, Draft, Node, Operand, Value, every_node, rewrite
from autopar.frontends.jax.sorted_rows import GROUPED
from autopar.rules.experts import STAYS

_GATES = frozenset(
    ("mul", "add", "sub", "silu", "relu", "gelu", "tanh", "sigmoid", "square", "exp", "neg")
)
"""Steps between the products: of one operand or two of one shape, place by place."""
_MOST = 2
"""Products in front of the gate."""


def experts_named(draft: Draft) -> Draft:
    if not any(node.kind == GROUPED for node in every_node(draft)):
        return draft
    return rewrite(draft, _visit)


def _visit(node: Node, builder: Builder) -> Sequence[Operand] | None:
    if node.kind != "einsum":
        return None
    made, weights = _mixed(node)
    if made is None or weights is None:
        return None
    apart = builder.made_by(made, "reshape")
    last = builder.made_by(apart.inputs[0], GROUPED) if apart is not None else None
    if last is None:
        return None
    h, index, down = last.inputs
    gate = _Gate(index)
    if not isinstance(h, Value) or not gate.follow(h, builder):
        return None
    tokens, each = weights.shape
    x = _tokens(gate.rows, tokens, each, builder)
    if x is None or made.shape[:2] != (tokens, each):
        return None
    attrs = {
        "reads": "all" if len(gate.first) == 1 else "apart",
        "transposed": True,
        "bias": False,
        "gate": gate.steps(),
        STAYS: True,
    }
    chosen = builder.reshape(index, (tokens, each))
    inputs = (x, chosen, weights, *gate.first, down)
    return [builder.op("experts", inputs, node.out.shape, node.out.dtype, **attrs)]


def _mixed(node: Node) -> tuple[Value | None, Value | None]:
    """What experts made [n, k, d], and the weights [n, k] by which it is added up."""
    terms, _, result = node.attrs["equation"].partition("->")
    read = dict(zip(terms.split(","), node.inputs, strict=True))
    if len(read) != 2:
        return None, None
    (many, made), (few, weights) = sorted(read.items(), key=lambda item: -len(item[0]))
    same = len(many) == 3 and few == many[:2] and result == many[0] + many[2]
    if not same or not isinstance(made, Value) or not isinstance(weights, Value):
        return None, None
    return made, weights


@dataclass(slots=True)
class _Gate:
    """The steps between products of rows whose groups are ``index``.

    first: matrices of the products in front; ``rows``: that they multiply.
    order: the steps, operands first.
    """

    index: Operand
    first: list[Operand] = field(default_factory=list)
    rows: Operand | None = None
    places: dict[Value, int] = field(default_factory=dict)
    order: list[Node] = field(default_factory=list)

    def follow(self, value: Value, builder: Builder) -> bool:
        """Whether ``value`` is made so."""
        if value in self.places or any(value is node.out for node in self.order):
            return True
        node = builder.maker.get(value)
        if node is None:
            return False
        if node.kind == GROUPED:
            return self._product(value, node)
        alike = all(isinstance(x, Value) and x.shape == value.shape for x in node.inputs)
        plain = not node.attrs or node.kind == "gelu"
        if node.kind not in _GATES or not alike or not plain:
            return False
        if not all(self.follow(x, builder) for x in node.values):
            return False
        self.order.append(node)
        return True

    def _product(self, value: Value, node: Node) -> bool:
        rows, index, matrix = node.inputs
        if index is not self.index or (self.rows is not None and rows is not self.rows):
            return False
        self.rows = rows
        self.places[value] = len(self.first)
        self.first.append(matrix)
        return len(self.first) <= _MOST

    def steps(self) -> tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...]:
        """(kind, operands, attrs), operands by place: the products, then steps."""
        places = dict(self.places)
        for number, node in enumerate(self.order, len(self.first)):
            places[node.out] = number
        return tuple(
            (node.kind, tuple(places[x] for x in node.values), dict(node.attrs))
            for node in self.order
        )


def _tokens(rows: Operand | None, tokens: int, each: int, builder: Builder) -> Operand | None:
    """[n, d], of which ``rows`` [n k, d] have every one so often."""
    if each == 1 or rows is None:
        return rows
    flat = builder.made_by(rows, "reshape")
    wide = builder.made_by(flat.inputs[0], "expand") if flat is not None else None
    if wide is None or wide.out.shape[:2] != (tokens, each) or len(wide.out.shape) != 3:
        return None
    (narrow,) = wide.inputs
    if narrow.shape != (tokens, 1, wide.out.shape[2]):
        return None
    before = builder.made_by(narrow, "reshape")
    x = before.inputs[0] if before is not None else narrow
    return builder.reshape(x, (tokens, wide.out.shape[2]))
