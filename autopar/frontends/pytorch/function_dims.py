"""Rewriting a function's graphs so that `autopar.rules.composite` can follow more of their dims.

Two rewritings, each of which keeps what depends on what:

- Adding rows into zeros at an index (`index_add`, `scatter_add`) is a product with the one-hot
  matrix of the index, so that a sum over rows is seen as one.
- A dim made of two, ``[b, s, c] -> [b s, c]``, is followed as its major part: the rows of some b
  are one piece of it. So in the rewritten graph it has the extent of b, and s is whole. Every other
  op must bind to its rule as before; else no dim is followed so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.frontends.pytorch.function_graphs import Pulled
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.kinds import OWN_DERIVATIVE
from autopar.rules.composite import Indices, indices_of
from autopar.rules.localised import localised
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind

_PART = OWN_DERIVATIVE + "major_part"
_LETTERS = "abcdefghijklmnopqrstuvwxy"


@dataclass(frozen=True, slots=True)
class Followed:
    """The indices of a function's dims.

    inner: (graph, tensor, dim) -> how many entries of a dim made of several one of its index is.
    """

    indices: Indices
    inner: Mapping[tuple[str, str, int], int]

    def index(self, side: str, name: str, dim: int) -> str:
        return self.indices.of[side, name, dim]


def followed(pulled: Pulled) -> Followed:
    """The indices of ``pulled``. Raises `UnruledOp` for an op without a rule, `RuleError`."""
    plain = indices_of(pulled.forward, pulled.backward, pulled.gradients)
    graphs = {"forward": pulled.forward, "backward": pulled.backward}
    inner = _inner(graphs, plain)
    if not inner:
        return Followed(plain, {})
    parts = {side: _major_parts(g, side, plain, inner) for side, g in graphs.items()}
    if not all(_alike(graphs[side], parts[side]) for side in graphs):
        return Followed(plain, {})
    indices = indices_of(parts["forward"], parts["backward"], pulled.gradients)
    places = {p: inner[name] for p, name in plain.of.items() if name in inner}
    return Followed(indices, places)


def with_products(pulled: Pulled) -> Pulled:
    """Rows that are added into zeros are products with one-hot matrices."""
    return replace(
        pulled, forward=_with_products(pulled.forward), backward=_with_products(pulled.backward)
    )


def _with_products(graph: Graph) -> Graph:
    tensors, ops = dict(graph.tensors), []
    zeros = {
        o for op in graph.ops if op.kind == "full" and op.attrs["value"] == 0 for o in op.outputs
    }
    for op in graph.ops:
        added = _added_at(op, zeros)
        if added is None:
            ops.append(op)
            continue
        index, source, dim = added
        own = tensors[op.name]
        dim %= max(len(own.shape), 1)
        rows, columns = tensors[index].shape, own.shape[dim]
        hot = Tensor(f"{op.name}.hot", (*rows, columns), own.dtype)
        tensors[hot.name] = hot
        read = _LETTERS[: len(own.shape)]
        at = read if len(rows) == len(read) else read[dim]
        equation = f"{at}z,{read}->{read[:dim]}z{read[dim + 1 :]}"
        ops.append(Op("one_hot", (index,), (hot.name,), {"classes": columns}))
        ops.append(Op("einsum", (hot.name, source), op.outputs, {"equation": equation}))
    return replace(graph, tensors=tensors, ops=tuple(ops))


def _added_at(op: Op, zeros: set[str]) -> tuple[str, str, int] | None:
    """(index, source, dim) of an op that adds the rows of source into zeros."""
    if op.kind == "scatter_sum":
        return op.inputs[1], op.inputs[0], op.attrs["dim"]
    if op.kind == "aten::index_add" and len(op.inputs) == 3 and op.inputs[0] in zeros:
        call = op.attrs["torch"]
        if not call["kwargs"] and list(call["args"][2:]) == ["%1", "%2"]:
            return op.inputs[1], op.inputs[2], call["args"][1]
    return None


def _inner(graphs: Mapping[str, Graph], plain: Indices) -> dict[str, int]:
    """By index of a dim made of several: the entries that stand for one of its major part. Where
    ops say different numbers the index is left out."""
    numbers: dict[str, set[int]] = {}
    for side, graph in graphs.items():
        for op, bound in _reshapes(graph):
            for name, dim, factors in _dims(op, bound):
                if len(factors) > 1:
                    major = bound.factors[factors[0]].size
                    size = graph.tensors[name].shape[dim]
                    numbers.setdefault(plain.of[side, name, dim], set()).add(size // major)
    return {name: min(ways) for name, ways in numbers.items() if len(ways) == 1}


def _reshapes(graph: Graph) -> Iterator[tuple[Op, BoundRule]]:
    """Those that make dims of several, or several of one."""
    for op in graph.ops:
        if op.kind == "reshape":
            bound = bind(op, graph.tensors)
            if any(len(factors) > 1 for _, _, factors in _dims(op, bound)):
                yield op, bound


def _dims(op: Op, bound: BoundRule) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    ends = ((op.inputs[0], bound.operands[0]), (op.outputs[0], bound.results[0]))
    for name, term in ends:
        for dim, factors in enumerate(term):
            yield name, dim, factors


def _major_parts(graph: Graph, side: str, plain: Indices, inner: Mapping[str, int]) -> Graph:
    """``graph`` with the dims of ``inner`` as long as their major part."""
    rewritten = {
        op.name: _rule_of_parts(op, bound, side, plain, inner) for op, bound in _reshapes(graph)
    }
    graph = localised(graph, side, plain, inner)
    ops = [
        Op(_PART, op.inputs, op.outputs, {"rule": rewritten[op.name]})
        if rewritten.get(op.name)
        else op
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops))


def _rule_of_parts(
    op: Op, bound: BoundRule, side: str, plain: Indices, inner: Mapping[str, int]
) -> str:
    """The rule of a reshape between dims and major parts; empty where a dim of it stays."""
    minor: set[str] = set()
    terms: dict[str, list[str]] = {op.inputs[0]: [], op.outputs[0]: []}
    for name, dim, factors in _dims(op, bound):
        if len(factors) > 1:
            if plain.of[side, name, dim] not in inner:
                return ""
            minor.update(factors[1:])
        terms[name].append(factors[0] if factors else "1")

    def text(term: list[str]) -> str:
        return " ".join(f"{f}!" if f in minor else f for f in term)

    return f"{text(terms[op.inputs[0]])} -> {text(terms[op.outputs[0]])}"


def _alike(graph: Graph, parts: Graph) -> bool:
    """Whether every op that was not rewritten binds to the same factors as before."""
    return all(
        new.kind == _PART
        or _shape_of(bind(old, graph.tensors)) == _shape_of(bind(new, parts.tensors))
        for old, new in zip(graph.ops, parts.ops, strict=True)
    )


def _shape_of(bound: BoundRule) -> object:
    """What of a bound rule does not depend on extents."""
    kinds = {name: factor.kind for name, factor in bound.factors.items()}
    return bound.operands, bound.results, kinds, bound.rule.implementations
