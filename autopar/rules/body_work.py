"""The work of ops with bodies: that of the ops in them, on a rank's pieces.

A scan does the work of its body at each step; a branch that of its dearest body; a loop, of which
nobody knows how often it runs, that of one turn. Each op of a body is priced as an op outside would
be, with the kernels that a compiler makes of them, so a step of small ops is mostly their launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.nouns.graph import DTYPE_BYTES, Graph, Op, Tensor
from autopar.nouns.kinds import (
    AGAIN,
    BODIES,
    CARRIED,
    FLOPS,
    KEEPS,
    LENGTH,
    LOOP,
    PRODUCTS,
    SCAN,
    STACKED,
    UNGRADED,
)
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.rules.bodies import bodies_of, body_indices
from autopar.rules.composite import Indices
from autopar.rules.extents import ONE_DEVICE, WHOLE_OP, extents
from autopar.rules.fusion import fusion
from autopar.rules.localised import localised
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.strategies import Strategy
from autopar.rules.work import PRODUCTS as COSTLY
from autopar.rules.work import Work, op_work

Names = tuple[str, ...]
Terms = tuple[tuple[float, Names], ...]
Tensors = Mapping[str, Tensor]


def work_of(
    op: Op,
    bound: BoundRule,
    strategy: Strategy,
    mesh: Mesh,
    tensors: Tensors,
) -> tuple[tuple[Work, ...], ...]:
    """For each way to go through an op with bodies, the works of the ops on it, once."""
    local, indices = extents(bound, strategy, mesh), body_indices(op, tensors)
    ways = {name: factor.size // local[name] for name, factor in bound.factors.items()}
    bodies = [
        _works(graded(localised(body.graph, str(i), indices, ways), op, tensors))
        for i, body in enumerate(bodies_of(op))
    ]
    if op.kind == LOOP:  # the test and the step
        return (tuple(work for works in bodies for work in works),)
    return tuple(bodies)


def times_of(op: Op, bound: BoundRule, strategy: Strategy, mesh: Mesh) -> int:
    """How many steps one rank runs."""
    if op.kind != SCAN:
        return 1
    if op.attrs[CARRIED] or not op.attrs[STACKED]:
        return int(op.attrs[LENGTH])
    local, (time, *_) = extents(bound, strategy, mesh), bound.operands[op.attrs[STACKED][0]]
    return math.prod(local[f] for f in time)


def with_body_work(
    work: Work, op: Op, bound: BoundRule, strategy: Strategy, mesh: Mesh, tensors: Tensors
) -> Work:
    """``work`` with that of the bodies that the op has, if it has any."""
    if BODIES not in op.attrs:
        return work
    return replace(
        work,
        bodies=work_of(op, bound, strategy, mesh, tensors),
        times=times_of(op, bound, strategy, mesh),
        again=bool(op.attrs.get(AGAIN)),
    )


def _works(body: Graph) -> tuple[Work, ...]:
    kernels = fusion(body)
    works = []
    for op in body.ops:
        bound = bind(op, body.tensors)
        if bound.rule.view:
            continue
        given = (op, bound, WHOLE_OP, ONE_DEVICE, body.tensors)
        work = op_work(*given, kernels.moves.get(key(None, op.name)))
        works.append(with_body_work(work, *given))
    return tuple(works)


def graded(body: Graph, op: Op, tensors: Tensors) -> Graph:
    """A body with the values marked through which the gradient of the op's results flows."""
    if not any(tensors[n].differentiable for n in op.outputs):
        return body
    marked = {
        name
        for name, given in zip(body.inputs, _given(body, op), strict=True)
        if tensors[given].differentiable or given in _begins(op)
    }
    marked = {n for n in marked if "float" in body.tensors[n].dtype}
    for each in body.ops:
        if marked.intersection(each.inputs):
            marked.update(n for n in each.outputs if "float" in body.tensors[n].dtype)
    tensors = {n: replace(t, differentiable=n in marked) for n, t in body.tensors.items()}
    return replace(body, tensors=tensors)


def _given(body: Graph, op: Op) -> Names:
    """The operands of the op that the inputs of one of its bodies are."""
    if op.kind == SCAN:
        return op.inputs
    return op.inputs[len(op.inputs) - len(body.inputs) :]


def _begins(op: Op) -> Names:
    """Of a scan, the operands of carries that gradients come back to from the step after."""
    without = op.attrs.get(UNGRADED, ())
    return tuple(op.inputs[x] for i, x in enumerate(op.attrs.get(CARRIED, ())) if i not in without)


def facts_of_scan(op: Op, tensors: Tensors, indices: Indices) -> dict[str, Any]:
    """The attrs that say what a scan does and keeps."""
    products, terms = _flops(op, indices)
    return {PRODUCTS: products, FLOPS: terms, KEEPS: _kept(op, tensors, indices)}


def _flops(op: Op, indices: Indices) -> tuple[bool, Terms]:
    """(whether those of products, floating-point operations of all steps as `Rule.flop_terms`): of
    products alone where a step has any, as the utilization of a device counts them."""
    (body,), times = bodies_of(op), op.attrs[LENGTH]
    products, others = _Sum(), _Sum()
    for each in body.graph.ops:
        bound = bind(each, body.graph.tensors)
        terms = bound.rule.flop_terms or ((bound.rule.flops, tuple(bound.factors)),)
        for count, names in terms if not bound.rule.view else ():
            size, own = _outer(each, bound, names, indices)
            some = products if bound.rule.cost in COSTLY else others
            some.add(own, float(count * size * times))
    return bool(products.by), (products if products.by else others).terms()


def _kept(op: Op, tensors: Tensors, indices: Indices) -> tuple[tuple[int, Names], ...]:
    """(bytes for each point of indices, indices) of what all steps keep for backward beside the
    op's operands: what they make, and the carries. Steps that run again keep these alone."""
    (body,), times, kept = bodies_of(op), op.attrs[LENGTH], _Sum()
    graph, inside = body.graph, _Kept(body.graph)
    held = {op.inputs[i] for i in op.attrs[CARRIED]}
    begins = {n for n, given in zip(graph.inputs, op.inputs, strict=True) if given in held}
    marked = graded(graph, op, tensors)
    saved = {n for n in begins if marked.tensors[n].differentiable}
    for each in () if op.attrs.get(AGAIN) else marked.ops:
        if not any(marked.tensors[n].differentiable for n in each.outputs):
            continue
        bound = bind(each, marked.tensors)
        rule = bound.rule
        saved.update(inside.root[each.inputs[i]] for i in rule.saves if i < len(each.inputs))
        saved.update(inside.root[each.outputs[i]] for i in rule.saves_results)
        for one in rule.keeps:
            size, own = _outer(each, bound, one.dims, indices)
            kept.add(own, one.itemsize * size * times)
    for name in sorted(saved - (set(graph.inputs) - begins)):
        tensor = graph.tensors[name]
        places = [(indices.of["0", name, d], n) for d, n in enumerate(tensor.shape)]
        size, own = _split(places, indices)
        kept.add(own, DTYPE_BYTES[tensor.dtype] * size * times)
    return tuple((int(count), names) for count, names in kept.terms())


class _Kept:
    """``root``: of a view the tensor that it looks at."""

    def __init__(self, graph: Graph) -> None:
        self.root = {name: name for name in graph.tensors}
        for op in graph.ops:
            if op.inputs and bind(op, graph.tensors).rule.view:
                self.root.update({n: self.root[op.inputs[0]] for n in op.outputs})


class _Sum:
    def __init__(self) -> None:
        self.by: dict[Names, float] = {}

    def add(self, names: Names, count: float) -> None:
        self.by[names] = self.by.get(names, 0) + count

    def terms(self) -> Terms:
        return tuple((count, names) for names, count in sorted(self.by.items()) if count)


def _outer(op: Op, bound: BoundRule, names: Names, indices: Indices) -> tuple[int, Names]:
    """(extents of what is whole, indices that may be split) of factors of an op of a body."""
    index_of = dict(_indices_of(op, bound, indices))
    places = [(index_of.get(f, ""), bound.factors[f].size) for f in names if f in bound.factors]
    return _split(places, indices)


def _indices_of(op: Op, bound: BoundRule, indices: Indices) -> Iterator[tuple[str, str]]:
    terms = (*bound.operands, *bound.results)
    for name, term in zip((*op.inputs, *op.outputs), terms, strict=True):
        for d, factors in enumerate(term):
            if len(factors) == 1:
                yield factors[0], indices.of["0", name, d]


def _split(places: list[tuple[str, int]], indices: Indices) -> tuple[int, Names]:
    words = indices.rule.text.replace("->", " ").replace(",", " ").split()
    own, size = [], 1
    for index, extent in places:
        if index in words and index not in own:
            own.append(index)
        else:
            size *= extent
    return size, tuple(sorted(own))
