"""A slice that takes one whole part out of what was put together is that part."""

from __future__ import annotations

from dataclasses import replace

from autopar.emit.pytorch.rewriting import Links, remade, swapped
from autopar.lowering.lowered import Lowered, LoweredOp


def without_detours(lowered: Lowered) -> Lowered:
    """``lowered`` with readers of such a slice reading the part, where nothing moves on the way.

    Labels shifted by one, ``y[..., 1:] = x[..., :-1]`` and then ``y[..., 0] = start``, are captured
    as a `cat` of a `slice` of a `cat`.
    """
    links = Links.of(lowered)
    parts = {op.op.name: part for op in lowered.ops if (part := _part(op, links))}
    new: dict[str, LoweredOp] = {}
    for op in lowered.ops:
        if any(o.name in parts for o in op.operands):
            operands = tuple(replace(o, name=parts.get(o.name, o.name)) for o in op.operands)
            new[op.op.name] = remade(op, op.op.kind, operands, op.op.attrs)
    return swapped(lowered, new)


def _part(op: LoweredOp, links: Links) -> str:
    """The tensor that a slice gives; "" where it is none that is there already."""
    tensors = links.lowered.tensors
    attrs = op.op.attrs
    if op.op.kind != "slice" or attrs["step"] != 1 or op.op.name in links.returned:
        return ""
    (whole,) = op.operands
    maker = links.makers.get(whole.name)
    if maker is None or maker.op.kind != "cat" or maker.op.attrs["dim"] != attrs["dim"]:
        return ""
    start = 0
    for part in maker.operands:
        stop = start + tensors[part.name].tensor.shape[attrs["dim"]]
        if (start, stop) == (attrs["start"], attrs["stop"]):
            moved = (*whole.steps, *part.steps, *tensors[whole.name].steps)
            moved += tensors[op.op.name].steps
            alike = tensors[part.name].shared == tensors[op.op.name].shared
            return part.name if alike and not moved else ""
        start = stop
    return ""
