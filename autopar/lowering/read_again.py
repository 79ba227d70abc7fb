"""Parameters outside of blocks that the backward of a JAX stage reads, and so gathers again.

A stage of a JAX program keeps no gathered parameter from its forward to its backward, of which
there are as many as microbatches in flight. What backward does not read, such as the table of a
lookup, XLA does not gather again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.lowering.lowered import Lowered
from autopar.lowering.state import Stored


def gathered_back(lowered: Lowered, stored: Sequence[Stored]) -> list[Stored]:
    """``stored``, of a stage, with what is in no block marked by whether backward reads it."""
    read = _read_back(lowered)
    return [p if p.unit else replace(p, again=p.name in read) for p in stored]


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
