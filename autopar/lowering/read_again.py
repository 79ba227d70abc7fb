"""Parameters outside of blocks that the backward of a JAX stage reads, and so gathers again.

A stage of a JAX program keeps no gathered parameter from its forward to its backward, of which
there are as many as microbatches in flight. What backward does not read, such as the table of a
lookup, XLA does not gather again; small parameters travel together (`units.SMALL_BYTES` of the
runtime), so all of them do where one is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.lowering.lowered import Lowered
from autopar.lowering.state import Stored
from autopar.nouns.graph import DTYPE_BYTES

SMALL_BYTES = 1 << 20


def gathered_back(lowered: Lowered, stored: Sequence[Stored]) -> list[Stored]:
    """``stored``, of a stage, with what is in no block marked by whether it is gathered again."""
    read = _read_back(lowered)
    groups: dict[tuple[str, bool], bool] = {}
    for p in stored:
        if not p.unit and _small(p, lowered):
            key = p.dtype, p.trainable
            groups[key] = groups.get(key, False) or p.name in read
    return [
        p
        if p.unit
        else replace(
            p, again=groups[p.dtype, p.trainable] if _small(p, lowered) else p.name in read
        )
        for p in stored
    ]


def _small(p: Stored, lowered: Lowered) -> bool:
    local = p.sharding.local_shape(p.shape, lowered.mesh)
    return math.prod(local) * DTYPE_BYTES[p.dtype] <= SMALL_BYTES


def _read_back(lowered: Lowered) -> set[str]:
    """Names of parameters that ops save, as they are or as views."""
    tensors = lowered.graph.tensors
    origin = {name: name for name in tensors}
    read: set[str] = set()
    for op in lowered.ops:
        if op.bound is None:
            continue
        if op.bound.rule.view and op.op.inputs:
            origin.update(dict.fromkeys(op.op.outputs, origin[op.op.inputs[0]]))
        if any(tensors[name].differentiable for name in op.op.outputs):
            saved = (i for i in op.bound.rule.saves if i < len(op.op.inputs))
            read.update(origin[op.op.inputs[i]] for i in saved)
    return {name for name in read if tensors[name].role == "parameter"}
