"""Experts that a plan places on ranks by their rows: which layers may be, and on how many ranks.

A layer's experts may lie otherwise than in order where its matrices are parameters that are stored
as they are computed with: split by experts, on the axes that split the layer's experts, in equal
pieces (`ExpertLayer.placeable`). Matrices that are split along their columns besides stay so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.lowering.lowered import Lowered, LoweredOp, LoweringError
from autopar.nouns.expert_placement import ExpertPlacement
from autopar.nouns.mesh import Mesh
from autopar.rules.expert_layers import ExpertLayer, expert_layers, matrices_of


def expert_axes(op: LoweredOp, mesh: Mesh) -> tuple[str, ...]:
    """The axes of several ranks that split the experts of an op, in the order of the mesh."""
    bound = op.bound
    assert bound is not None
    place = op.op.inputs.index(matrices_of(op.op)[0])
    experts = set(bound.operands[place][0])
    over = {axis for axis, choice in op.strategy.choices if experts & {*bound.splits(choice)}}
    return tuple(axis for axis in mesh.axes if axis in over and mesh.size(axis) > 1)


def ranks_of(lowered: Lowered) -> dict[str, tuple[ExpertLayer, int]]:
    """By module, the layers whose experts may be placed, and the ranks that share them."""
    return {
        name: (layer, ranks)
        for layer, op, part in _sites(lowered)
        if layer.placeable and (ranks := _sharing(op, part)) > 1
        for name in layer.modules
    }


def _sites(lowered: Lowered) -> Iterator[tuple[ExpertLayer, LoweredOp, Lowered]]:
    for layer in expert_layers(lowered.graph):
        part = lowered if layer.block is None else lowered.blocks[layer.block]
        (op,) = (op for op in part.ops if op.op.name == layer.op.name)
        yield layer, op, part


def _sharing(op: LoweredOp, part: Lowered) -> int:
    """Ranks among which its experts may be placed; 1 where they may not."""
    axes = expert_axes(op, part.mesh)
    ranks = part.mesh.ways(axes)
    held = [part.tensors[name] for name in matrices_of(op.op)]
    for each in held:
        stored = [a for a in each.produced.split_axes(0) if part.mesh.size(a) > 1]
        if sorted(stored) != sorted(axes) or each.tensor.shape[0] % ranks:
            return 1
    return ranks


def check_placement(lowered: Lowered, placement: Mapping[str, ExpertPlacement]) -> None:
    """Raises `LoweringError` where a plan places experts of a layer that has others, or that are on
    other ranks."""
    known = ranks_of(lowered)
    for name, placed in placement.items():
        if name not in known:
            may = f"; there are {', '.join([*known][:4])}" if known else ""
            raise LoweringError(
                f"expert_placement[{name!r}]: no ranks share a layer of experts that is held "
                f"there{may}"
            )
        layer, ranks = known[name]
        if (len(placed.ranks), len(placed.experts)) != (ranks, layer.experts):
            raise LoweringError(
                f"expert_placement[{name!r}] has {len(placed.experts)} experts on "
                f"{len(placed.ranks)} ranks, and {ranks} ranks share {layer.experts} there"
            )
