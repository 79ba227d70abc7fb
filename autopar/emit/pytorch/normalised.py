"""A division by the length of the vector, not less than a small number: `F.normalize`."""

from __future__ import annotations

from autopar.emit.pytorch.rewriting import Links, remade, swapped
from autopar.lowering.lowered import Lowered, LoweredOp

_NORM = "aten::linalg_vector_norm"


def as_normalised(lowered: Lowered) -> Lowered:
    """``x / norm(x, keepdim=True).clamp(min=eps)`` as one op ``normalize``."""
    links = Links.of(lowered)
    swaps: dict[str, LoweredOp] = {}
    for op in lowered.ops:
        if op.op.kind != "div" or len(op.operands) != 2:
            continue
        x, length = op.operands
        clamp = links.feeder(length)
        norm = links.feeder(clamp.operands[0]) if clamp and clamp.op.kind == "clamp" else None
        if clamp is None or norm is None or norm.op.kind != _NORM:
            continue
        setting = _setting(norm)
        eps = clamp.op.attrs.get("min")
        alike = norm.operands[0] == x and not x.steps
        if alike and setting is not None and eps and clamp.op.attrs.get("max") is None:
            swaps[op.op.name] = remade(op, "normalize", (x,), {"dim": setting, "eps": eps})
    return swapped(lowered, swaps)


def _setting(norm: LoweredOp) -> int | None:
    """The one dim of a Euclidean norm that keeps it."""
    call = norm.op.attrs.get("torch", {})
    args = [*call.get("args", ()), None, None, None][1:4]
    order, dims, keep = args
    one = isinstance(dims, list | tuple) and len(dims) == 1
    return int(dims[0]) if one and order == 2 and keep and not call.get("kwargs") else None
