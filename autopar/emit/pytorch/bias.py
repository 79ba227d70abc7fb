"""A product and the bias added to it are one call again, where nothing happens in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.lowering.lowered import Lowered, LoweredOp, Operand
from autopar.nouns.graph import Op

FUSED = "fused_bias"
"""Attr of a product whose last operand is its bias."""


def fuse_biases(lowered: Lowered) -> Lowered:
    """``lowered`` with `linear`, `linear_t` and `conv` taking their bias as a last operand."""
    readers = {name: len(reads) for name, reads in lowered.graph.consumers().items()}
    for name in lowered.graph.outputs:
        readers[name] += 1
    makers = {name: op for op in lowered.ops for name in op.op.outputs}
    swapped: dict[str, LoweredOp] = {}
    dropped: set[str] = set()
    for op in lowered.ops:
        if op.op.kind != "add" or len(op.operands) != 2:
            continue
        product = makers.get(op.operands[0].name)
        if product is None or product.op.kind not in ("linear", "linear_t", "conv"):
            continue
        name = product.op.name
        plain = not op.operands[0].steps and not lowered.tensors[name].steps
        if not plain or readers[name] != 1 or name in dropped:
            continue
        bias = _bias(op.operands[1], product, lowered, makers, readers)
        if bias is None or any(p.kind == "P" for _, p in product.results[0].placements):
            continue
        fused = Op(
            product.op.kind,
            (*product.op.inputs, bias.name),
            op.op.outputs,
            {**product.op.attrs, FUSED: True},
            product.op.source,
        )
        swapped[op.op.name] = replace(
            product, op=fused, operands=(*product.operands, bias), results=op.results
        )
        dropped.add(name)
        if bias is not op.operands[1]:
            dropped.add(op.operands[1].name)
    if not swapped:
        return lowered
    ops = tuple(swapped.get(o.op.name, o) for o in lowered.ops if o.op.name not in dropped)
    return replace(lowered, ops=ops)


def _bias(
    operand: Operand,
    product: LoweredOp,
    lowered: Lowered,
    makers: Mapping[str, LoweredOp],
    readers: Mapping[str, int],
) -> Operand | None:
    """The operand as a bias: a vector that is a parameter, for a conv one that is reshaped."""
    maker = makers.get(operand.name)
    if maker is not None:
        reshaped = maker.op.kind == "reshape" and product.op.kind == "conv"
        alone = readers[operand.name] == 1 and not operand.steps
        if not reshaped or not alone or lowered.tensors[operand.name].steps:
            return None
        operand = maker.operands[0]
    elif product.op.kind == "conv":
        return None
    tensor = lowered.graph.tensors[operand.name]
    return operand if tensor.role == "parameter" and len(tensor.shape) == 1 else None
