"""Counts over the global batch: what a mean over labelled tokens divides by.

A program's ``counts`` runs the way from the batch to the labels by itself, on whole model axes,
before the forward; the runtime adds up what all ranks that split the batch have, over all
microbatches. Where an op on the way needs the labels of other ranks, they are gathered there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.lowering.lowered import (
    BATCH_AXES,
    Lowered,
    LoweredOp,
    LoweredTensor,
    LoweringError,
    Operand,
)
from autopar.nouns.axes import BATCH, SLICE
from autopar.nouns.graph import Graph
from autopar.nouns.kinds import CROSS_ENTROPIES, DRAWS
from autopar.nouns.sharding import Sharding
from autopar.rules.reshard import reshard
from autopar.rules.resharding import Collective, Step, collectives
from autopar.rules.strategies import Strategy


def global_counts(graph: Graph) -> int:
    """Losses that are means over the labelled tokens of the batch: each asks for one count."""
    bodies = [block.body for block in graph.blocks.values()]
    return sum(
        op.kind in CROSS_ENTROPIES
        and op.attrs.get("reduction", "mean") == "mean"
        and op.attrs.get("ignore_index", -100) is not None  # else every row counts, by its shape
        for part in (graph, *bodies)
        for op in part.ops
    )


def counted(lowered: Lowered) -> list[LoweredOp]:
    """Ops whose mean needs a count."""
    for block in lowered.blocks.values():
        if counted(block):
            raise LoweringError("a cross-entropy inside a repeated block needs a count of its own")
    return [
        op
        for op in lowered.ops
        if op.op.kind in CROSS_ENTROPIES and op.op.attrs.get("reduction", "mean") == "mean"
    ]


def labels_of(lowered: Lowered, op: LoweredOp) -> str:
    """The labels of ``op`` before the views that change their shape and not how many there are."""
    makers = {name: made for made in lowered.ops for name in made.op.outputs}
    name = op.op.inputs[1]
    while name in makers and makers[name].op.kind in ("reshape", "transpose", "view"):
        name = makers[name].op.inputs[0]
    return name


def labels_only(lowered: Lowered, ops: Sequence[LoweredOp]) -> Lowered:
    """The part of ``lowered`` that makes the labels of ``ops``, on the axes of the batch alone."""
    labels = [labels_of(lowered, op) for op in ops]
    wanted = set(labels)
    kept: list[LoweredOp] = []
    for op in reversed(lowered.ops):
        if wanted.intersection(op.op.outputs):
            if op.op.kind == "block" or op.op.kind in DRAWS:  # `label_counts` counts in the forward
                raise LoweringError(
                    f"labels that come out of a {op.op.kind} cannot be counted before"
                )
            kept.append(op)
            wanted.update(op.op.inputs)
    tensors: dict[str, LoweredTensor] = {}
    for name, value in lowered.tensors.items():
        produced, shared = _of_batch(value.produced), _of_batch(value.shared)
        steps = _steps(lowered, name, produced, shared) if name in wanted else ()
        tensors[name] = LoweredTensor(value.tensor, produced, shared, steps)

    def on_batch_axes(op: LoweredOp) -> LoweredOp:
        operands = tuple(_operand(lowered, tensors, o) for o in op.operands)
        chosen = tuple((a, c) for a, c in op.strategy.choices if a in BATCH_AXES)
        results = tuple(map(_of_batch, op.results))
        return replace(op, strategy=Strategy(chosen), operands=operands, results=results)

    outputs = tuple(Operand(n, tensors[n].shared, (), False) for n in dict.fromkeys(labels))
    parts = tuple(map(on_batch_axes, reversed(kept)))
    return replace(lowered, ops=parts, tensors=tensors, outputs=outputs)


def held_whole(part: Lowered, labels: str) -> list[str]:
    """Axes of the batch whose ranks, or slices, all have the same labels, so that one alone counts
    them."""
    placed = part.tensors[labels].shared
    return [a for a in part.mesh.axes if a in (SLICE, *BATCH) and placed.on(a).kind != "S"]


def label_collectives(lowered: Lowered) -> Iterator[tuple[str, Collective]]:
    """(tensor, collective) that ``counts`` of a program has for each microbatch."""
    ops = counted(lowered) if global_counts(lowered.graph) else []
    if not ops:
        return
    part = labels_only(lowered, ops)
    moved = [(name, value.steps) for name, value in part.tensors.items()]
    moved += [(o.name, o.steps) for op in part.ops for o in op.operands]
    for name, steps in moved:
        dtype = part.graph.tensors[name].dtype
        yield from ((name, one) for one in collectives(steps, dtype, part.mesh, "forward"))


def _operand(lowered: Lowered, tensors: dict[str, LoweredTensor], operand: Operand) -> Operand:
    wanted = _of_batch(operand.wanted)
    steps = _steps(lowered, operand.name, tensors[operand.name].shared, wanted)
    return replace(operand, wanted=wanted, steps=steps)


def _of_batch(sharding: Sharding) -> Sharding:
    return Sharding(tuple((a, p) for a, p in sharding.placements if a in BATCH_AXES))


def _steps(lowered: Lowered, name: str, source: Sharding, target: Sharding) -> tuple[Step, ...]:
    shape = lowered.graph.tensors[name].shape
    steps = reshard(source, target, shape, lowered.mesh, differentiable=False)
    assert steps is not None, f"{name} is resharded so in the forward"
    return steps
