"""Bytes that an op keeps for its backward pass on one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.lowering.lowered import LoweredOp
from autopar.nouns.graph import DTYPE_BYTES, Tensor
from autopar.nouns.mesh import Mesh
from autopar.rules.held_bytes import kept_bytes


def saved_bytes(
    op: LoweredOp, tensors: Mapping[str, Tensor], mesh: Mesh, names: Sequence[str]
) -> int:
    """Local bytes of ``names`` (operands or results of ``op``), and of what the op itself keeps."""
    assert op.bound is not None
    total = 0
    if any(tensors[n].differentiable for n in op.op.outputs):
        total += sum(kept_bytes(op.bound, op.strategy, mesh))
    for name in names:
        if name in op.op.inputs:
            sharding = op.operands[op.op.inputs.index(name)].wanted
        else:
            sharding = op.results[op.op.outputs.index(name)]
        tensor = tensors[name]
        local = sharding.local_shape(tensor.shape, mesh)
        total += math.prod(local) * DTYPE_BYTES[tensor.dtype]
    return total
