"""Which products of a layer run in 8 bits at a local shape, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from autopar.cost_models.kernels.narrow_linear import Added, added, magnitudes_s, speeds_up
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.cluster import Device
from autopar.nouns.graph import Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.recipes import Narrow
from autopar.rules.narrow import (
    OPEN,
    RECIPE,
    Local,
    joins,
    local_of,
    narrow_of,
    possible,
    running,
    wanted_of,
)
from autopar.rules.resharding import Collective

Moving = Callable[[Collective], float]
"""Seconds of a collective."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a layer is narrow, None: nothing, and what that adds to its time on one rank, with
    the collectives that join scales. ``least_s``: the least that any of its products would."""

    narrow: Narrow | None
    added: Added
    local: Local
    least_s: float = 0.0


def settled_op(
    op: LoweredOp, tensors: Mapping[str, Tensor], mesh: Mesh, device: Device, moving: Moving
) -> LoweredOp:
    """The op with what of an open recipe gains; itself where none is open."""
    if OPEN not in op.op.attrs:
        return op
    choice = chosen(op, tensors, mesh, device, moving)
    attrs = {name: v for name, v in op.op.attrs.items() if name not in (OPEN, RECIPE)}
    if choice.narrow is not None:
        attrs[RECIPE] = str(choice.narrow)
    return replace(op, op=replace(op.op, attrs=attrs))


def settled(lowered: Lowered, device: Device, moving: Moving) -> Lowered:
    """The lowered graph with every open recipe settled, blocks too."""
    if not has_open(lowered):
        return lowered
    tensors, mesh = lowered.graph.tensors, lowered.mesh
    ops = tuple(
        op if op.bound is None else settled_op(op, tensors, mesh, device, moving)
        for op in lowered.ops
    )
    blocks = {name: settled(body, device, moving) for name, body in lowered.blocks.items()}
    by_name = {op.op.name: op.op for op in ops}
    graph = replace(lowered.graph, ops=tuple(by_name.get(o.name, o) for o in lowered.graph.ops))
    return replace(lowered, ops=ops, blocks=blocks, graph=graph)


def has_open(lowered: Lowered) -> bool:
    """Whether any op's recipe is open."""
    parts = (lowered, *lowered.blocks.values())
    return any(OPEN in op.op.attrs for part in parts for op in part.ops)


def recipes_of(lowered: Lowered) -> dict[str, str]:
    """The recipes of a settled graph by op key."""
    parts = (*lowered.blocks.values(), lowered)
    return {
        key(part.block, op.op.name): op.op.attrs[RECIPE]
        for part in parts
        for op in part.ops
        if RECIPE in op.op.attrs
    }


def chosen(
    op: LoweredOp, tensors: Mapping[str, Tensor], mesh: Mesh, device: Device, moving: Moving
) -> Choice:
    """Of the recipe's products those that together take least. Where a device has no products in 8
    bits they are emulated: nothing gains, and all that may be are narrow."""
    narrow = narrow_of(op.op)
    assert narrow is not None
    assert op.bound is not None
    local = local_of(op.op, op.bound, op.strategy, mesh)
    may = possible(local, narrow, op.strategy, wanted_of(op.op, tensors))
    dtype = tensors[op.op.inputs[0]].dtype
    if not may:
        return Choice(None, Added(), local)
    if not speeds_up(device):
        return Choice(Narrow(narrow.recipe, may), Added(), local)
    tried = [
        Narrow(narrow.recipe, products)
        for count in range(1, len(may) + 1)
        for products in combinations(may, count)
    ]
    costs = [(_cost_s(one, local, dtype, device, moving), i) for i, one in enumerate(tried)]
    least_s, place = min(costs)
    if least_s >= 0:
        return Choice(None, Added(), local, least_s)
    best = tried[place]
    return Choice(best, added(device, local.rows, local.n, local.k, dtype, best), local, least_s)


def _cost_s(narrow: Narrow, local: Local, dtype: str, device: Device, moving: Moving) -> float:
    beside = added(device, local.rows, local.n, local.k, dtype, narrow)
    return beside.total_s + sum(moving(moved) for _, moved in joins(local, narrow))


def added_of(op: LoweredOp, tensors: Mapping[str, Tensor], mesh: Mesh, device: Device) -> Added:
    """What a settled layer's recipe adds to the time of its arithmetic."""
    layer = _running(op, tensors, mesh)
    if layer is None:
        return Added()
    local, narrow = layer
    dtype = tensors[op.op.inputs[0]].dtype
    return added(device, local.rows, local.n, local.k, dtype, narrow)


def again_s(op: LoweredOp, tensors: Mapping[str, Tensor], mesh: Mesh, device: Device) -> float:
    """Seconds of what a layer's forward does in 8 bits where it runs again with its product kept:
    largest magnitudes that ranks join, or that backward reads, are found beside the product."""
    layer = _running(op, tensors, mesh)
    if layer is None or "output" not in layer[1].products:
        return 0.0
    local, narrow = layer
    beside = narrow.recipe.covers == "tensor"
    if not beside and not any(way == "forward" for way, _ in joins(local, narrow)):
        return 0.0
    dtype = tensors[op.op.inputs[0]].dtype
    return magnitudes_s(device, local.rows, local.n, local.k, dtype)


def _running(
    op: LoweredOp, tensors: Mapping[str, Tensor], mesh: Mesh
) -> tuple[Local, Narrow] | None:
    if op.bound is None:
        return None
    return running(op.op, op.bound, op.strategy, mesh, wanted_of(op.op, tensors))
