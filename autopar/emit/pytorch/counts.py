"""How a forward names the counts that its means divide by (`autopar.lowering.counts`)."""

from __future__ import annotations

from autopar.lowering.lowered import LoweredOp


def count_names(ops: list[LoweredOp]) -> dict[str, str]:
    """For each of ``ops`` by name the expression of its count in a forward."""
    keys = ["loss"] if len(ops) == 1 else [f"loss{i + 1}" for i in range(len(ops))]
    return {op.op.name: f'counts["{k}"]' for op, k in zip(ops, keys, strict=True)}
