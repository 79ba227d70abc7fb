"""The working form between a jaxpr and a `Graph`: nodes over values that have no names yet.

A `Draft` is a list of `Node` in topological order. An operand is a `Value` or a `Uniform`, one
number at every place, which becomes an attr of the op and never a tensor. Passes are functions from
draft to draft, most of them a visitor given to `rewrite`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.nouns.graph import Source

Shape = tuple[int, ...]
NARROW = ("float32", "bfloat16", "float16")
"""Floats narrower than those that programs are compared in."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One tensor of the program; two values are the same only when they are the same object.

    ``path`` is the tree path of a parameter or the key of a batch entry, "" for all others. A
    parameter that is ``frozen`` is an array that the loss closes over.
    """

    shape: Shape
    dtype: str
    role: Literal["parameter", "input", "activation"] = "activation"
    path: str = ""
    frozen: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Uniform:
    """The same number everywhere. Two are equal that are written alike: -0.0 is not 0.0."""

    value: bool | int | float
    dtype: str
    shape: Shape = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uniform) and self._written() == other._written()

    def __hash__(self) -> int:
        return hash(self._written())

    def _written(self) -> tuple[str, str, Shape]:
        return repr(self.value), self.dtype, self.shape


Operand = Value | Uniform


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One op; ``kind`` and ``attrs`` as in `autopar.nouns.kinds`.

    Besides those there is ``scan``: a block whose body is the `Draft` ``attrs["body"]``. Where
    ``attrs["each"]`` has an input of the body, every layer has an entry of the batch of its own
    there, and the first one's stands in ``inputs``.
    """

    kind: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: Source = field(default_factory=Source)

    @property
    def out(self) -> Value:
        return self.outputs[0]

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(v for v in self.inputs if isinstance(v, Value))


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """``inputs`` are the parameters and batch entries, in the body of a scan also its carries."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Operand, ...]

    def makers(self) -> dict[Value, Node]:
        """For each value the node that makes it."""
        return {out: node for node in self.nodes for out in node.outputs}

    def readers(self) -> dict[Value, list[Node]]:
        """For each value the nodes that read it, once each, in order."""
        readers: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.values):
                readers.setdefault(value, []).append(node)
        return readers


def every_node(draft: Draft) -> Iterator[Node]:
    """Those of bodies of scans too."""
    for node in draft.nodes:
        yield node
        if node.kind == "scan":
            yield from every_node(node.attrs["body"])


class Builder:
    """Collects nodes; what a visitor of `rewrite` gets to look around and to add ops."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.maker: dict[Value, Node] = {}
        self.source = Source()

    def append(self, node: Node) -> None:
        self.nodes.append(node)
        for out in node.outputs:
            self.maker[out] = node

    def op(
        self, kind: str, inputs: Sequence[Operand], shape: Shape, dtype: str, /, **attrs: Any
    ) -> Value:
        """Adds an op with one result and returns the result."""
        out = Value(tuple(map(int, shape)), dtype)
        self.append(Node(kind, tuple(inputs), (out,), attrs, self.source))
        return out

    def made_by(self, operand: Operand, *kinds: str) -> Node | None:
        """The node that makes ``operand``, if it is of one of ``kinds``."""
        node = self.maker.get(operand) if isinstance(operand, Value) else None
        return node if node is not None and node.kind in kinds else None

    def tensor(self, x: Operand) -> Value:
        """``x`` as a tensor: a uniform operand is made by an op."""
        if isinstance(x, Value):
            return x
        attrs = {"shape": x.shape, "value": x.value, "dtype": x.dtype}
        return self.op("full", (), x.shape, x.dtype, **attrs)

    def reshape(self, x: Operand, shape: Shape) -> Operand:
        if isinstance(x, Uniform):
            return replace(x, shape=shape)
        return x if x.shape == shape else self.op("reshape", (x,), shape, x.dtype, shape=shape)

    def transpose(self, x: Operand, dims: tuple[int, ...]) -> Operand:
        shape = tuple(x.shape[d] for d in dims)
        if isinstance(x, Uniform):
            return replace(x, shape=shape)
        if dims == tuple(range(len(dims))):
            return x
        return self.op("transpose", (x,), shape, x.dtype, dims=dims)

    def expand(self, x: Operand, shape: Shape) -> Operand:
        if isinstance(x, Uniform):
            return replace(x, shape=shape)
        return x if x.shape == shape else self.op("expand", (x,), shape, x.dtype, shape=shape)


Visit = Callable[[Node, Builder], Sequence[Operand] | None]


def rewrite(draft: Draft, visit: Visit) -> Draft:
    """Offers each node to ``visit``, operands already replaced.

    ``visit`` returns None to keep the node, or one operand per result that takes its place.
    Bodies of scans are rewritten first. What nobody reads afterwards is dropped.
    """
    builder = Builder()
    replaced: dict[Value, Operand] = {}

    def now(operand: Operand) -> Operand:
        return replaced.get(operand, operand) if isinstance(operand, Value) else operand

    for old in draft.nodes:
        inputs = tuple(map(now, old.inputs)) if replaced else old.inputs
        node = old if inputs == old.inputs else replace(old, inputs=inputs)
        if node.kind == "scan":
            body = rewrite(node.attrs["body"], visit)
            node = replace(node, attrs={**node.attrs, "body": body})
        builder.source = node.source
        results = visit(node, builder)
        if results is None:
            builder.append(node)
        else:
            replaced.update(zip(node.outputs, results, strict=True))
    outputs = tuple(map(now, draft.outputs))
    return live(Draft(draft.inputs, tuple(builder.nodes), outputs))


def live(draft: Draft) -> Draft:
    """Without the nodes whose results nobody reads."""
    needed = {v for v in draft.outputs if isinstance(v, Value)}
    kept: list[Node] = []
    for node in reversed(draft.nodes):
        if any(out in needed for out in node.outputs):
            kept.append(node)
            needed.update(node.values)
    return Draft(draft.inputs, tuple(reversed(kept)), draft.outputs)


def ordered(draft: Draft) -> Draft:
    """The nodes in the order in which the results ask for them, operands from the left.

    Equal programs have equal order, whatever order their lines were written in.
    """
    maker = draft.makers()
    nodes: list[Node] = []
    done: set[Node] = set()
    # (node, whether its operands have been asked for)
    results = [v for v in reversed(draft.outputs) if isinstance(v, Value)]
    todo = [(maker[v], False) for v in results if v in maker]
    while todo:
        node, ready = todo.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            if node.kind == "scan":
                node = replace(node, attrs={**node.attrs, "body": ordered(node.attrs["body"])})
            nodes.append(node)
            continue
        todo.append((node, True))
        todo.extend((maker[v], False) for v in reversed(node.values) if v in maker)
    return Draft(draft.inputs, tuple(nodes), draft.outputs)


def merged(draft: Draft) -> Draft:
    """Equal nodes on equal operands made one (common sub-expressions)."""
    seen: dict[Any, tuple[Value, ...]] = {}

    def visit(node: Node, builder: Builder) -> Sequence[Operand] | None:
        if node.kind == "scan":
            return None
        # the builder stands for the level: a body's values are not visible outside of it
        attrs = repr(sorted(node.attrs.items())) if node.attrs else ""
        identity = (builder, node.kind, node.inputs, attrs)
        if identity in seen:
            return seen[identity]
        seen[identity] = node.outputs
        return None

    return rewrite(draft, visit)


def broadcast(*shapes: Shape) -> Shape | None:
    """The shape that ``shapes`` broadcast to, None where they do not."""
    rank = max(map(len, shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[i] not in (1, size):
                return None
            result[i] = max(result[i], size) if size != 0 else 0
    return tuple(result)
