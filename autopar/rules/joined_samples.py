"""Samples of several parts of a batch that a model joins and runs at once.

    both = cat([chosen, rejected])      c0 c1 .. r0 r1 ..      c0 r0 c1 r1 ..
    chosen, rejected = f(both)[:n], f(both)[n:]

Models compare what they make of two views, answers or guidances of one sample so. Behind such a
join the samples of one rank do not lie one behind the other, so that every rank would have to run
all of them. What treats each sample alike does not ask in which order they lie: they are joined in
turns here, one sample's parts side by side, which splits as the batch does; where a part is taken
out, each sample's is. What asks for the order gets it back. That nothing in between asks is read
off the rules: an op may be run on a piece of any samples exactly if it treats them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.nouns.errors import first_of
from autopar.nouns.graph import Graph, Op, Tensor, unique
from autopar.nouns.sharding import split
from autopar.rules.batch import batch_flow
from autopar.rules.implementations.table import GLOBAL_COUNT, SYNCHRONISED
from autopar.rules.notation import BoundRule
from autopar.rules.pieces import BatchMixed, leads
from autopar.rules.registry import UnruledOp, bind

IN_ANY_ORDER = frozenset((GLOBAL_COUNT, SYNCHRONISED))
"""Implementations of an op on some of the samples that are the same for any of them; others count
from the first, or look for what belongs to their place."""
COUNTED = frozenset(("place_rows",))
"""Kinds of which one sample's result hangs on how much those before it take."""


@dataclass(frozen=True, slots=True)
class Turns:
    """How a tensor has joined samples: ``dim`` has ``samples`` times ``parts``, a sample's parts
    side by side, as its major factor."""

    dim: int
    samples: int
    parts: int


def in_turns(graph: Graph, batch_dims: Mapping[str, int]) -> tuple[Graph, tuple[str, ...]]:
    """The graph with joined samples in turns, and where it joins them; itself where nothing reads
    a parameter behind a join, or a result of the graph would have another order."""
    places: tuple[str, ...] = ()
    while True:
        joins = _joins(graph, batch_dims)
        made = _Rewriting(graph, joins).made() if joins else None
        if made is None:
            return graph, places
        graph = made
        places += tuple(str(op.source) for op in joins.values())


def _joins(graph: Graph, batch_dims: Mapping[str, int]) -> dict[str, Op]:
    """Those that join equal parts of the batch along its dim."""
    joins = {op.name: op for op in graph.ops if op.kind == "cat" and _is_even(op, graph.tensors)}
    if not joins:
        return {}
    try:
        states = batch_flow(graph, batch_dims).tensors
    except (BatchMixed, UnruledOp):
        return {}
    first = str(split(0))
    return {n: op for n, op in joins.items() if all(states.get(i) == first for i in op.inputs)}


def joined_note(places: Sequence[str]) -> tuple[str, ...]:
    """A sentence to the user."""
    if not places:
        return ()
    return (
        f"What is joined at {first_of(places, 2)} lies sample by sample, each one's parts side by "
        "side, so that ranks and microbatches have whole samples of it",
    )


def _is_even(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    shapes = {tensors[name].shape for name in op.inputs}
    return op.attrs["dim"] in (0, -len(next(iter(shapes)))) and len(op.inputs) > 1 == len(shapes)


@dataclass(slots=True)
class _Rewriting:
    """Once through the ops of a graph; ``joins``: by name."""

    graph: Graph
    joins: Mapping[str, Op]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    turns: dict[str, Turns] = field(default_factory=dict)
    back: dict[str, str] = field(default_factory=dict)
    """By the name of a tensor in turns that of the same in the model's own order."""
    apart: dict[str, Tensor] = field(default_factory=dict)
    """By the name of a tensor in turns that with parts in a dim of their own."""
    learns: bool = False
    """Whether an op with parameters runs on samples in turns."""

    def made(self) -> Graph | None:
        self.tensors.update(self.graph.tensors)
        for op in self.graph.ops:
            self._op(op)
        if not self.learns or any(name in self.turns for name in self.graph.outputs):
            return None
        return replace(self.graph, tensors=self.tensors, ops=tuple(self.ops))

    def _op(self, op: Op) -> None:
        turns = {name: self.turns[name] for name in op.inputs if name in self.turns}
        if op.name in self.joins and not turns:
            self._join(op)
        elif not turns:
            self.ops.append(op)
        elif not (len(op.inputs) == 1 and self._takes_parts(op, *turns.values())):
            results = alike(op, self.graph, turns)
            if results is None:
                given = tuple(self._in_order(name, op) for name in op.inputs)
                self.ops.append(replace(op, inputs=given))
                return
            self.ops.append(op)
            self.turns.update(results)
            self.learns |= op.kind == "block" or any(
                self.tensors[name].role == "parameter" for name in op.inputs
            )

    def _join(self, op: Op) -> None:
        samples, *rest = self.tensors[op.inputs[0]].shape
        parts = len(op.inputs)
        stacked = self._add("stack", op, op.inputs, {"dim": 1}, (samples, parts, *rest))
        self._reshape(op, stacked, (samples * parts, *rest), op.name)
        self.turns[op.name] = Turns(0, samples, parts)

    def _takes_parts(self, op: Op, turns: Turns) -> bool:
        """Writes an op that takes whole parts out as one that takes them of each sample."""
        (name,) = op.inputs
        old = self.tensors[name].shape
        apart = (*old[: turns.dim], turns.parts, old[turns.dim] // turns.parts)
        if op.kind == "reshape" and self.tensors[op.name].shape == (*apart, *old[turns.dim + 1 :]):
            self._parts_first(op, name, turns, op.name)
            return True
        taken = list(_taken(op, turns, self.tensors))
        if not taken:
            return False
        for result, first, last in taken:
            self._take(op, turns, result, first, last)
        return True

    def _take(self, op: Op, turns: Turns, result: str, first: int, last: int) -> None:
        """Parts ``first`` to before ``last`` of every sample."""
        dim, shape = turns.dim, self.tensors[result].shape
        apart = self._apart(op, op.inputs[0], turns)
        count = last - first
        if count == 1 and len(apart.shape) == len(shape) + 1:
            self._add("select", op, (apart.name,), {"dim": dim + 1, "index": first}, shape, result)
            return
        cut = (*apart.shape[: dim + 1], count, *apart.shape[dim + 2 :])
        attrs = {"dim": dim + 1, "start": first, "stop": last, "step": 1}
        own = self._add("slice", op, (apart.name,), attrs, cut)
        self._reshape(op, own, shape, result)
        if count > 1:
            self.turns[result] = Turns(dim, turns.samples, count)

    def _in_order(self, name: str, reader: Op) -> str:
        """The name of a tensor in the order of the model, for an op that asks for it."""
        if name not in self.turns:
            return name
        if name not in self.back:
            first = self._parts_first(reader, name, self.turns[name])
            self.back[name] = self._reshape(reader, first, self.tensors[name].shape).name
        return self.back[name]

    def _parts_first(self, op: Op, name: str, turns: Turns, result: str | None = None) -> Tensor:
        """The parts of all samples, one part behind the other in a dim of their own."""
        apart, dim = self._apart(op, name, turns), turns.dim
        dims = [*range(len(apart.shape))]
        dims[dim], dims[dim + 1] = dim + 1, dim
        shape = tuple(apart.shape[d] for d in dims)
        together = len(self.tensors[name].shape) + 1 == len(shape)
        made = self._add(
            "transpose",
            op,
            (apart.name,),
            {"dims": tuple(dims)},
            shape,
            result if together else None,
        )
        if together or result is None:
            return made
        return self._reshape(op, made, self.tensors[result].shape, result)

    def _apart(self, op: Op, name: str, turns: Turns) -> Tensor:
        """``[.., samples, parts, what else is in their dim, ..]``."""
        if name not in self.apart:
            tensor, dim = self.tensors[name], turns.dim
            inner = tensor.shape[dim] // (turns.samples * turns.parts)
            held = (turns.samples, turns.parts, *[inner] * (inner > 1))
            shape = (*tensor.shape[:dim], *held, *tensor.shape[dim + 1 :])
            self.apart[name] = self._reshape(op, tensor, shape)
        return self.apart[name]

    def _reshape(
        self, op: Op, of: Tensor, shape: Sequence[int], result: str | None = None
    ) -> Tensor:
        return self._add("reshape", op, (of.name,), {"shape": tuple(shape)}, shape, result)

    def _add(
        self,
        kind: str,
        op: Op,
        inputs: tuple[str, ...],
        attrs: Mapping[str, Any],
        shape: Sequence[int],
        result: str | None = None,
    ) -> Tensor:
        """One more op in the place of ``op``; ``result``: its name, of a tensor that there is."""
        source = self.tensors[inputs[0]]
        graded = any(self.tensors[name].differentiable for name in inputs)
        if result is None:
            folder = op.name.rpartition("/")[0]
            name = unique(f"{folder}/{kind}" if folder else kind, self.tensors)
            tensor = Tensor(name, tuple(shape), source.dtype, differentiable=graded)
            self.tensors[name] = tensor
        else:
            tensor = self.tensors[result]
        self.ops.append(Op(kind, inputs, (tensor.name,), attrs, op.source))
        return tensor


def _taken(op: Op, turns: Turns, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
    """The results of a slice or split along the dim of joined samples with the first part that each
    has, and the one behind its last; none where it cuts through a part."""
    shape = tensors[op.inputs[0]].shape
    if op.kind not in ("slice", "split") or op.attrs["dim"] % len(shape) != turns.dim:
        return
    part = shape[turns.dim] // turns.parts
    sizes = [tensors[name].shape[turns.dim : turns.dim + 1] for name in op.outputs]
    ranks = {len(tensors[name].shape) for name in op.outputs}
    if ranks != {len(shape)} or any(size % part for (size,) in sizes):
        return
    first = 0
    if op.kind == "slice":
        first = op.attrs["start"] or 0
        if op.attrs.get("step", 1) != 1 or first % part or sizes[0][0] == shape[turns.dim]:
            return
    for name, (size,) in zip(op.outputs, sizes, strict=True):
        yield name, first // part, (first + size) // part
        first += size


def alike(op: Op, graph: Graph, turns: Mapping[str, Turns]) -> dict[str, Turns] | None:
    """How the results of an op have joined samples that it treats alike, of those which have them;
    None where it may ask for their order. ``turns``: of its operands that have them."""
    if len({(t.samples, t.parts) for t in turns.values()}) > 1:
        return None
    if op.kind == "block":
        return _alike_inside(op, graph.blocks[op.attrs["block"]].body, turns)
    try:
        bound = bind(op, graph.tensors)
    except UnruledOp:
        return None
    factor = _factor(op, bound, turns)
    if factor is None or op.kind in COUNTED:
        return None
    one = next(iter(turns.values()))
    results: dict[str, Turns] = {}
    for i, name in enumerate(op.outputs):
        dim = bound.holder(i, factor)
        if dim is not None:
            results[name] = replace(one, dim=dim)
        elif bound.factors[factor].kind != "summed":
            return None
    return results


def _alike_inside(op: Op, body: Graph, turns: Mapping[str, Turns]) -> dict[str, Turns] | None:
    inside = {
        inner: turns[outer]
        for inner, outer in zip(body.inputs, op.inputs, strict=True)
        if outer in turns
    }
    for each in body.ops:
        own = {name: inside[name] for name in each.inputs if name in inside}
        if not own:
            continue
        results = alike(each, body, own)
        if results is None:
            return None
        inside.update(results)
    pairs = zip(body.outputs, op.outputs, strict=True)
    return {outer: inside[inner] for inner, outer in pairs if inner in inside}


def _factor(op: Op, bound: BoundRule, turns: Mapping[str, Turns]) -> str | None:
    """The factor that joined samples are to an op that runs on any of them alike."""
    factors: set[str | None] = set()
    for i, name in enumerate(op.inputs):
        held = turns.get(name)
        if held is None:
            continue
        dim = bound.operands[i][held.dim]
        major = next((f for f in dim if bound.factors[f].size > 1), None)
        whole = major is None or bound.factors[major].size % (held.samples * held.parts)
        factors.add(None if whole else major)
    factor = factors.pop() if len(factors) == 1 else None
    if factor is None or bound.factors[factor].kind == "whole" or not leads(bound, factor):
        return None
    implemented = bound.rule.implemented(factor)
    if implemented is not None and implemented.name not in IN_ANY_ORDER:
        return None
    others = (i for i, name in enumerate(op.inputs) if name not in turns)
    if any(bound.operand_holder(i, factor) is not None for i in others):
        return None
    return factor
