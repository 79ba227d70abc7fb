"""Writing a graph; `autopar.nouns.text.graph` says how it looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.nouns.graph import Graph, Source, Tensor
from autopar.nouns.text.lines import INDENT, is_literal, name, shape, value
from autopar.nouns.text.repeats import Entry, folded, names

ORIGINAL = "torch"
"""The attr that is an original call, which stands at the end of a line."""


class Notes:
    """What a text says of a graph beside what the graph is; this one says nothing."""

    def first(self) -> list[str]:
        """Lines before all others."""
        return []

    def type(self, tensor: str) -> str:
        """Of a tensor, behind its type: a sharding."""
        return ""

    def op(self, place: int) -> str:
        """Of an op, behind its types: ``by strategy [rule]``."""
        return ""

    def below(self, tensor: str) -> list[str]:
        """Lines below that which declares or makes a tensor."""
        return []

    def below_op(self, place: int) -> list[str]:
        """Lines below an op."""
        return []

    def last(self) -> list[str]:
        """Lines behind all ops."""
        return []

    def block(self, name: str) -> Notes:
        """Those of a block's body."""
        return self


def written(graph: Graph, head: str, notes: Notes) -> str:
    """The text of a graph and of what is said of it; ``head`` begins it."""
    lines = [f"{head} {_signature(graph)}", *_deeper(_body(graph, notes))]
    return "\n".join(lines)


def _deeper(lines: Iterator[str] | list[str]) -> Iterator[str]:
    return (INDENT + line for line in lines)


def _signature(graph: Graph) -> str:
    ends = (", ".join(map(name, names)) for names in (graph.inputs, graph.outputs))
    return " -> ".join(ends).strip()


def _body(graph: Graph, notes: Notes) -> Iterator[str]:
    yield from notes.first()
    for block in graph.blocks.values():
        where = f"x {len(block.instances)}, {names(block.instances)}"
        yield f"block {name(block.name)} {where}: {_signature(block.body)}"
        yield from _deeper(_body(block.body, notes.block(block.name)))
    yield from folded(list(_entries(graph, notes)))
    yield from notes.last()


def _entries(graph: Graph, notes: Notes) -> Iterator[Entry]:
    declared = _declared(graph)
    for place, op in enumerate(graph.ops):
        for tensor in declared[place]:
            yield Entry(tuple(_declaration(tensor, notes)))
        yield Entry(tuple(_op(graph, place, notes)), op.kind == "block")
    for tensor in declared[-1]:
        yield Entry(tuple(_declaration(tensor, notes)))


def _declared(graph: Graph) -> list[list[Tensor]]:
    """The values that no op makes, by the place of the op before which they stand.

    Before what reads them, and else so that the order of all values is that of the text.
    """
    maker = {n: place for place, op in enumerate(graph.ops) for n in op.outputs}
    reader = {n: place for place, op in reversed([*enumerate(graph.ops)]) for n in op.inputs}
    before: list[list[Tensor]] = [[] for _ in range(len(graph.ops) + 1)]
    place = 0
    for tensor in graph.tensors.values():
        if tensor.name in maker:
            place = max(place, maker[tensor.name] + 1)
        else:
            before[min(place, reader.get(tensor.name, place))].append(tensor)
    return before


def _declaration(tensor: Tensor, notes: Notes) -> Iterator[str]:
    yield f"{tensor.role} {name(tensor.name)} : {_type(tensor, notes)}"
    yield from _deeper(notes.below(tensor.name))


def _type(tensor: Tensor, notes: Notes) -> str:
    grad = "grad" if tensor.differentiable else ""
    words = (name(tensor.dtype) + shape(tensor.shape), grad, notes.type(tensor.name))
    return " ".join(filter(None, words))


def _op(graph: Graph, place: int, notes: Notes) -> Iterator[str]:
    """The line of an op and those below it."""
    op = graph.ops[place]
    results = [graph.tensors[n] for n in op.outputs]
    types = [("" if t.role == "activation" else f"{t.role} ") + _type(t, notes) for t in results]
    call = _original(op.attrs.get(ORIGINAL))
    texts = {k: v for k, v in sorted(op.attrs.items()) if isinstance(v, str) and is_literal(v)}
    attrs = {k: v for k, v in op.attrs.items() if k not in texts and not (call and k == ORIGINAL)}
    inside = _arguments(", ".join(map(name, op.inputs)), attrs)
    line = f"{', '.join(map(name, op.outputs))} = {name(op.kind)}({inside}) : {', '.join(types)}"
    yield " ".join(filter(None, (line, notes.op(place), _source(op.source), call)))
    for key, text in texts.items():
        yield f"{INDENT}{name(key)}:"
        yield from _deeper(list(_deeper(text.split("\n"))))
    yield from _deeper(notes.below_op(place))
    for result in op.outputs:
        yield from _deeper(notes.below(result))


def _arguments(given: str, named: dict[str, Any]) -> str:
    attrs = ", ".join(f"{name(k)}={value(v)}" for k, v in sorted(named.items()))
    return "; ".join(filter(None, (given, attrs)))


def _source(source: Source) -> str:
    if source == Source():
        return ""
    parts = [name(source.module)] if source.module else []
    parts += [f"({name(source.owner)})"] if source.owner else []
    parts += [f"{name(source.file)}:{source.line}"] if source.file or source.line else []
    return " ".join(("@", *parts))


def _original(call: Any) -> str:
    """A call that was written down as such; nothing where the attr is something else."""
    match call:
        case {"target": str(target), "args": tuple(args), "kwargs": dict(kwargs), **rest}:
            if not rest:
                return f"~ {name(target)}({_arguments(', '.join(map(value, args)), kwargs)})"
    return ""
