"""A `Lowered` as text: its graph (`autopar.nouns.text.graph`) and what a spread adds::

    lowered tokens, targets -> cross_entropy
      on dp_shard=2 x tp=2
      parameter up.weight : float32[512, 128] grad dp_shard:D tp:S0
      up/linear = linear(norm, up.weight) : float32[16, 128, 512] grad dp_shard:S0 tp:S2
          by dp_shard:b tp:n [b s k+, n k+ -> b s n] @ up (Linear) model.py:78
        reads norm as dp_shard:S0 tp:D grad: tp R->D none/all_reduce [8, 128, 128]
      ...
      cross_entropy = cross_entropy(...) ...
        runs vocabulary_parallel over tp
        runs all_reduce over tp, 4096 bytes, forward
      returns cross_entropy as dp_shard:P grad

(An op is one line; that one is broken for the page.) Shapes are those of the whole, and behind a
type stands how the value is split where it is made. ``by`` gives the op's strategy, and its rule,
whose letters the strategy names. Below an op stand the operands that it reads otherwise than they
are shared among readers; below a value how it is shared where that is not how it is made. In how
many ``pieces`` collectives beside products run is said by key at the start. A step
is ``axis from->to forward/backward``, with the shape on one rank before it. What an op ``runs`` are
the implementations in place of its plain call, and their collectives.

That nothing is missing is tested: what `tests.text.reading_lowered` reads is what was lowered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.lowering.issued import internal_collectives
from autopar.lowering.lowered import Lowered, LoweredOp, LoweredTensor, Operand
from autopar.nouns.graph import Graph, Op
from autopar.nouns.mesh import Mesh
from autopar.nouns.text.lines import name, shape
from autopar.nouns.text.writing import Notes, written
from autopar.rules.resharding import Step
from autopar.rules.strategies import flows


def to_text(lowered: Lowered) -> str:
    """The graph and what follows from its spread."""
    return written(lowered.graph, "lowered", _Spread(lowered))


@dataclass(frozen=True, slots=True)
class _Spread(Notes):
    """What the text says of a graph that is lowered."""

    lowered: Lowered
    inside: bool = False

    def first(self) -> list[str]:
        if self.inside:
            return []
        block = [] if self.lowered.block is None else [f"in {name(self.lowered.block)}"]
        pieces = [f"pieces {name(of)} {count}" for of, count in self.lowered.pieces.items()]
        return [f"on {self.lowered.mesh}", *block, *pieces]

    def type(self, tensor: str) -> str:
        return str(self.lowered.tensors[tensor].produced)

    def op(self, place: int) -> str:
        op = self.lowered.ops[place]
        return "" if op.bound is None else f"by {op.strategy} [{op.bound}]"

    def below(self, tensor: str) -> list[str]:
        value = self.lowered.tensors[tensor]
        if value.shared == value.produced and not value.steps:
            return []
        return [f"shares {name(tensor)} as {value.shared}{_steps(value.steps)}"]

    def below_op(self, place: int) -> list[str]:
        op, whole = self.lowered.ops[place], self.lowered
        shared = as_shared(op.op, whole.graph, whole.tensors, whole.blocks)
        reads = [
            f"reads {_which(op.op, i)} {_wanted(operand)}"
            for i, operand in enumerate(op.operands)
            if operand != shared[i]
        ]
        return reads + runs(op, whole.mesh)

    def last(self) -> list[str]:
        return [f"returns {name(o.name)} {_wanted(o)}" for o in self.lowered.outputs]

    def block(self, name: str) -> Notes:
        return _Spread(self.lowered.blocks[name], inside=True)


def runs(op: LoweredOp, mesh: Mesh) -> list[str]:
    """A line for each implementation of an op, and for each collective inside of it."""
    ways = [f"runs {name} over {', '.join(axes)}" for name, axes in op.implementations.items()]
    moved = () if op.bound is None else internal_collectives(op, mesh)
    return ways + [
        f"runs {one.collective.kind} over {one.collective.axis}, {one.collective.size_bytes} "
        f"bytes, {one.direction}" + (f", {one.times} times" if one.times > 1 else "")
        for one in moved
    ]


def _which(op: Op, place: int) -> str:
    """An operand by name, and by place where it is read twice."""
    operand = op.inputs[place]
    return name(operand) + (f" #{place}" if op.inputs.count(operand) > 1 else "")


def _wanted(operand: Operand) -> str:
    grad = " grad" if operand.differentiable else ""
    return f"as {operand.wanted}{grad}{_steps(operand.steps)}"


def _steps(steps: Sequence[Step]) -> str:
    texts = (
        f"{s.axis} {s.source}->{s.target} {s.forward}/{s.backward} {shape(s.local_shape)}"
        for s in steps
    )
    return f": {', '.join(texts)}" if steps else ""


def as_shared(
    op: Op, graph: Graph, tensors: Mapping[str, LoweredTensor], blocks: Mapping[str, Lowered]
) -> list[Operand]:
    """The operands of ``op`` where it reads each as it is shared."""
    if op.kind == "block":
        body = blocks[op.attrs["block"]].graph
        into = tuple(
            body.tensors[inner].differentiable and graph.tensors[outer].differentiable
            for inner, outer in zip(body.inputs, op.inputs, strict=True)
        )
    else:
        into, _ = flows(op, graph.tensors)
    return [Operand(n, tensors[n].shared, (), g) for n, g in zip(op.inputs, into, strict=True)]
