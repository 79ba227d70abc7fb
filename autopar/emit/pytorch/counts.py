"""Counts over the global batch: what a mean over labelled tokens divides by.

The program's ``counts`` runs the way from the batch to the labels by itself, on whole model axes,
before the forward; the runtime adds up what all data ranks and microbatches found.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.emit.pytorch.site import EmitError, data_part
from autopar.lowering.spread import Lowered, LoweredOp, LoweredTensor, Operand
from autopar.nouns.axes import BATCH
from autopar.nouns.kinds import DRAWS


def counted(lowered: Lowered) -> list[LoweredOp]:
    """Ops whose mean needs a count."""
    for block in lowered.blocks.values():
        if counted(block):
            raise EmitError("a cross-entropy inside a repeated block needs a count of its own")
    return [
        op
        for op in lowered.ops
        if op.op.kind == "cross_entropy" and op.op.attrs.get("reduction", "mean") == "mean"
    ]


def count_names(ops: list[LoweredOp]) -> dict[str, str]:
    """For each of ``ops`` by name the expression of its count in a forward."""
    keys = ["loss"] if len(ops) == 1 else [f"loss{i + 1}" for i in range(len(ops))]
    return {op.op.name: f'counts["{k}"]' for op, k in zip(ops, keys, strict=True)}


def labels_of(lowered: Lowered, op: LoweredOp) -> str:
    """The labels of ``op`` before the views that change their shape and not how many there are."""
    makers = {name: made for made in lowered.ops for name in made.op.outputs}
    name = op.op.inputs[1]
    while name in makers and makers[name].op.kind in ("reshape", "transpose", "view"):
        name = makers[name].op.inputs[0]
    return name


def labels_only(lowered: Lowered, ops: list[LoweredOp]) -> Lowered:
    """The part of ``lowered`` that makes the labels of ``ops``, split over data axes alone."""
    labels = [labels_of(lowered, op) for op in ops]
    wanted = set(labels)
    kept: list[LoweredOp] = []
    for op in reversed(lowered.ops):
        if wanted.intersection(op.op.outputs):
            if op.op.kind == "block" or op.op.kind in DRAWS:  # `label_counts` counts in the forward
                raise EmitError(f"labels that come out of a {op.op.kind} cannot be counted before")
            kept.append(_on_data_axes(op))
            wanted.update(op.op.inputs)
    kept.reverse()
    tensors = {
        name: LoweredTensor(t.tensor, data_part(t.produced), data_part(t.shared), ())
        for name, t in lowered.tensors.items()
    }
    outputs = tuple(Operand(n, tensors[n].shared, (), False) for n in dict.fromkeys(labels))
    return replace(lowered, ops=tuple(kept), tensors=tensors, outputs=outputs)


def held_whole(part: Lowered, labels: str) -> list[str]:
    """Axes of the batch whose ranks all have the same labels, so that one alone counts them."""
    placed = part.tensors[labels].shared
    return [a for a in part.mesh.axes if a in BATCH and placed.on(a).kind != "S"]


def _on_data_axes(op: LoweredOp) -> LoweredOp:
    operands = tuple(replace(o, wanted=data_part(o.wanted), steps=()) for o in op.operands)
    return replace(op, operands=operands, results=tuple(map(data_part, op.results)))
