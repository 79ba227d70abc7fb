"""The products with weights of one scope of a graph, and which of them feed which.

Values flow from one product to the next through ops that multiply by no weight; `Products` walks
that way back (`sources`) and on (`following`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from autopar.nouns.graph import Graph, Op, Tensor

STREAM = ""
"""Among the sources of a value: what is there before any product of its scope."""

_KINDS = {"linear", "linear_t", "matmul", "einsum"}
_VIEWS = {"reshape", "transpose", "cast", "expand", "identity"}


@dataclass(frozen=True, slots=True)
class Product:
    """``operand`` times a weight of ``count`` matrices of ``inputs`` x ``outputs``."""

    name: str
    weight: str
    operand: str
    inputs: int
    outputs: int
    count: int


class Products:
    """The top of a graph or the body of a block, read as products."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {name: op for op in graph.ops for name in op.outputs}
        self.readers = graph.consumers()
        self.parameters = [t for t in graph.tensors.values() if t.role == "parameter"]
        self.attentions = [op for op in graph.ops if op.kind == "attention"]
        self.experts = [op for op in graph.ops if op.kind == "experts"]
        self.all = {op.name: p for op in graph.ops if (p := self._product(op)) is not None}

    @cached_property
    def tables(self) -> list[Tensor]:
        """Weights whose rows are looked up."""
        weights = (self._weight(op.inputs[1]) for op in self.graph.ops if op.kind == "embedding")
        return [t for t in dict.fromkeys(weights) if t is not None and len(t.shape) == 2]

    def _weight(self, name: str) -> Tensor | None:
        """The parameter that ``name`` is a view of."""
        while (op := self.makers.get(name)) is not None and op.kind in _VIEWS:
            name = op.inputs[0]
        tensor = self.graph.tensors[name]
        return tensor if tensor.role == "parameter" else None

    def _product(self, op: Op) -> Product | None:
        if len(op.inputs) < 2 or not (op.kind in _KINDS or "::" in op.kind):
            return None
        first, second = op.inputs[:2]
        weight, operand, other = self._weight(second), first, second
        if weight is None and op.kind in ("matmul", "einsum"):
            weight, operand, other = self._weight(first), second, first
        if weight is None or len(weight.shape) < 2:
            return None
        row, matrix, result = (self.graph.tensors[n] for n in (operand, other, op.name))
        inputs, outputs = _sizes(op, row, matrix, result, turned=operand != first)
        if inputs * outputs == 0 or weight.numel % (inputs * outputs):
            return None
        count = weight.numel // (inputs * outputs)
        return Product(op.name, weight.name, operand, inputs, outputs, count)

    def named(self, names: Iterable[str]) -> list[Product]:
        """Those of ``names`` that are products, in order of name."""
        return [self.all[name] for name in sorted(names) if name in self.all]

    def _stops(self, op: Op) -> bool:
        return op.name in self.all or op.kind in ("attention", "block", "experts")

    def sources(self, name: str) -> set[str]:
        """The products that ``name`` is computed from, and `STREAM` where not from them alone."""
        names: set[str] = set()
        seen, open_names = set(), [name]
        while open_names:
            name = open_names.pop()
            if name in seen:
                continue
            seen.add(name)
            op = self.makers.get(name)
            if op is None:
                if self.graph.tensors[name].role not in ("parameter", "buffer"):
                    names.add(STREAM)
            elif op.name in self.all:
                names.add(op.name)
            elif op.kind in ("attention", "block", "embedding"):
                names.add(STREAM)
            else:
                open_names += op.inputs
        return names

    def following(self, name: str) -> set[str]:
        """The nearest products, attentions and blocks that ``name`` goes into."""
        names: set[str] = set()
        seen, open_names = {name}, [name]
        while open_names:
            for op, _ in self.readers.get(open_names.pop(), ()):
                if self._stops(op):
                    names.add(op.name)
                    continue
                fresh = [n for n in op.outputs if n not in seen]
                seen.update(fresh)
                open_names += fresh
        return names


def _sizes(
    op: Op, operand: Tensor, weight: Tensor, result: Tensor, turned: bool
) -> tuple[int, int]:
    """(values that a row has, values that it becomes) of a product with a weight; 0: no product.

    ``turned``: the weight is the first operand.
    """
    if op.kind == "einsum":
        return _einsum_sizes(op, weight, turned)
    if len(weight.shape) < 2:
        return 0, 0
    rows, columns = weight.shape[-2:]
    if op.kind == "linear" or turned:
        return columns, rows
    if op.kind in _KINDS:
        return rows, columns
    # An op that no rule is known for: products of grouped rows, where its shapes say so.
    fits = len(weight.shape) == 3 and (rows, columns) == (*operand.shape[-1:], *result.shape[-1:])
    return (rows, columns) if fits else (0, 0)


def _einsum_sizes(op: Op, weight: Tensor, turned: bool) -> tuple[int, int]:
    given, _, result = str(op.attrs["equation"]).replace(" ", "").replace("...", "").partition("->")
    terms = given.split(",")
    if len(terms) != 2 or not result:
        return 0, 0
    row, letters = (terms[1], terms[0]) if turned else (terms[0], terms[1])
    if len(letters) != len(weight.shape):
        return 0, 0
    sizes = dict(zip(letters, weight.shape, strict=True))
    inputs = math.prod(n for x, n in sizes.items() if x in row and x not in result)
    outputs = math.prod(n for x, n in sizes.items() if x in result and x not in row)
    return inputs, outputs
