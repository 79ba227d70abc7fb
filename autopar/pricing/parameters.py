"""What a graph holds of parameters and buffers on one model rank."""

from __future__ import annotations

import math
from collections.abc import Set

from autopar.lowering.lowered import Lowered, LoweredTensor, stored
from autopar.lowering.state import split_of
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.mesh import Mesh
from autopar.pricing.units.unit import Kind
from autopar.rules.narrow_gathers import narrow_weights


def read_late(lowered: Lowered) -> dict[Kind, int]:
    """Elements of trained parameters that ops behind the last block read."""
    names: set[str] = set()
    for op in reversed(lowered.ops):
        if op.bound is None:
            break
        names.update(op.op.inputs)
    numel: dict[Kind, int] = {}
    narrow = narrow_weights(lowered.graph)
    for value in (lowered.tensors[n] for n in names if n in lowered.tensors):
        if value.tensor.role == "parameter" and value.tensor.differentiable:
            kind, elements = _held_as(value, lowered.mesh, narrow)
            numel[kind] = numel.get(kind, 0) + elements
    return numel


def _held_as(value: LoweredTensor, mesh: Mesh, narrow: Set[str]) -> tuple[Kind, int]:
    """Of a parameter, and elements on one model rank."""
    held = stored(value.produced)
    elements = math.prod(held.local_shape(value.tensor.shape, mesh))
    return Kind(value.tensor.dtype, split_of(held), value.tensor.name in narrow), elements


def parameters_of(
    lowered: Lowered,
) -> tuple[dict[Kind, int], dict[Kind, int], dict[str, int], frozenset[str]]:
    """Elements on one model rank, trained and frozen, by kind; bytes of gradients that are partial
    sums, by model axes; the axes that cut a trained one."""
    trained: dict[Kind, int] = {}
    frozen: dict[Kind, int] = {}
    deferred: dict[str, int] = {}
    cutting: set[str] = set()
    narrow = narrow_weights(lowered.graph)
    for value in lowered.tensors.values():
        if value.tensor.role != "parameter":
            continue
        held = stored(value.produced)
        kind, numel = _held_as(value, lowered.mesh, narrow)
        elements = trained if value.tensor.differentiable else frozen
        elements[kind] = elements.get(kind, 0) + numel
        if not value.tensor.differentiable:
            continue
        cutting.update(axis for axis, placed in held.placements if placed.kind == "S")
        if axes := "+".join(axis for axis, placed in held.placements if placed.kind == "D"):
            deferred[axes] = deferred.get(axes, 0) + numel * DTYPE_BYTES[kind.dtype]
    return trained, frozen, deferred, frozenset(cutting)


def buffer_bytes(lowered: Lowered) -> int:
    own = sum(t.tensor.size_bytes for t in lowered.tensors.values() if t.tensor.role == "buffer")
    return own + sum(
        buffer_bytes(body) * len(dict.fromkeys(lowered.graph.blocks[name].instances))
        for name, body in lowered.blocks.items()
    )
