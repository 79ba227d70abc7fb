"""Masks and bounds as a person writes them: `tril`, `triu` and `clamp`.

A comparison of two ranges, one along the rows and one along the columns, is a band of a matrix of
ones; two of them joined by ``&`` are one band.
"""

from __future__ import annotations

from typing import Any

from autopar.emit.pytorch.rewriting import Links, remade, swapped
from autopar.lowering.lowered import Lowered, LoweredOp, Operand

_COMPARED = {"ge": (1, 0), "gt": (1, 1), "le": (-1, 0), "lt": (-1, 1)}  # direction, strictly
_BOUNDS = frozenset({"minimum", "maximum"})
_OUT_OF_REACH = 1e30
"""What nothing that is trained comes to, as the least number of a dtype in the place of minus
infinity."""


def as_bands(lowered: Lowered) -> Lowered:
    """``lowered`` with an op ``band`` for each comparison of rows with columns.

    Attrs of a band: ``shape``; ``lower`` and ``upper``, the first and last diagonal that is true,
    None where there is no bound.
    """
    links = Links.of(lowered)
    bands = {op.op.name: band for op in lowered.ops if (band := _band(op, links))}
    lowered = swapped(lowered, bands)
    links = Links.of(lowered)
    joined: dict[str, LoweredOp] = {}
    for op in lowered.ops:
        if op.op.kind != "and" or len(op.operands) != 2:
            continue
        left, right = (links.feeder(o) for o in op.operands)
        if left is None or right is None or {left.op.kind, right.op.kind} != {"band"}:
            continue
        if left.op.attrs["shape"] != right.op.attrs["shape"]:
            continue
        bounds: dict[str, Any] = {"shape": left.op.attrs["shape"]}
        for name, tighter in (("lower", max), ("upper", min)):
            given = [b for one in (left, right) if (b := one.op.attrs[name]) is not None]
            bounds[name] = tighter(given, default=None)
        joined[op.op.name] = remade(op, "band", (), bounds)
    return swapped(lowered, joined)


def _band(op: LoweredOp, links: Links) -> LoweredOp | None:
    if op.op.kind not in _COMPARED or len(op.operands) != 2:
        return None
    shape = links.lowered.graph.tensors[op.op.name].shape
    if len(shape) < 2 or any(p.kind == "S" for _, p in op.results[0].placements):
        return None
    first, second = (_range(operand, len(shape), links) for operand in op.operands)
    if first is None or second is None:
        return None
    (left, left_start), (right, right_start) = first, second
    rows, columns = len(shape) - 2, len(shape) - 1
    if {left, right} != {rows, columns}:
        return None
    direction, strict = _COMPARED[op.op.kind]
    # left >= right: with left along columns, column - row >= right_start - left_start.
    gap = right_start - left_start
    if left == columns:
        bounds = (gap + strict, None) if direction > 0 else (None, gap - strict)
    else:
        bounds = (None, -gap - strict) if direction > 0 else (-gap + strict, None)
    return remade(op, "band", (), {"shape": shape, "lower": bounds[0], "upper": bounds[1]})


def _range(operand: Operand, rank: int, links: Links) -> tuple[int, int] | None:
    """(dim, start) of a range 0, 1, 2, ... along one dim of ``rank``, whole on every rank."""
    name = operand.name
    steps = list(operand.steps)
    shape = links.lowered.graph.tensors[name].shape
    while True:
        maker = links.makers.get(name)
        steps += links.lowered.tensors[name].steps
        if maker is None or steps:
            return None
        if maker.op.kind == "reshape":
            steps += maker.operands[0].steps
            name = maker.operands[0].name
            continue
        break
    attrs = maker.op.attrs
    if maker.op.kind != "arange" or attrs.get("step", 1) not in (1, None):
        return None
    long = [d for d, n in enumerate(shape) if n != 1]
    start = attrs.get("start", 0) or 0
    if len(long) != 1 or not isinstance(start, int) or attrs.get("dtype", "int64") != "int64":
        return None
    return long[0] + rank - len(shape), start


def as_bounds(lowered: Lowered) -> Lowered:
    """``minimum`` and ``maximum`` with a tensor that is one number everywhere take the number,
    where no gradient meets it: of a tie ``clamp`` gives x all of it, and they a half."""
    links = Links.of(lowered)
    swaps: dict[str, LoweredOp] = {}
    for op in lowered.ops:
        if op.op.kind not in _BOUNDS or len(op.operands) != 2:
            continue
        for place, operand in enumerate(op.operands):
            maker = links.makers.get(operand.name)
            other = op.operands[1 - place]
            tensors = lowered.graph.tensors
            moved = [*operand.steps, *lowered.tensors[operand.name].steps]
            if maker is None or maker.op.kind != "full" or moved:
                continue
            if tensors[other.name].differentiable and abs(maker.op.attrs["value"]) < _OUT_OF_REACH:
                continue
            if tensors[other.name].shape != tensors[op.op.name].shape:
                continue  # the number's shape is needed
            attrs = {**op.op.attrs, "other": maker.op.attrs["value"]}
            swaps[op.op.name] = remade(op, op.op.kind, (other,), attrs)
            break
    return swapped(lowered, swaps)
