"""Bytes that an op reads and writes in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.rules.extents import ONE_DEVICE, WHOLE_OP
from autopar.rules.held_bytes import kept_bytes
from autopar.rules.notation import BoundRule
from autopar.rules.strategies import Strategy, flows, shardings

Flags = tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """Which operands and results an op reads and writes in memory, by position.

    reads, writes:        in forward.
    saved, saved_results: operands and results that backward reads.
    arriving, leaving:    results whose gradient it reads, operands whose gradient it writes.
    launches:             whether it pays the launch of a kernel (forward, backward).
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    saved: tuple[int, ...]
    saved_results: tuple[int, ...]
    arriving: tuple[int, ...]
    leaving: tuple[int, ...]
    launches: tuple[bool, bool] = (True, True)


def bytes_moved(
    bound: BoundRule,
    op: Op,
    tensors: Mapping[str, Tensor],
    strategy: Strategy = WHOLE_OP,
    mesh: Mesh = ONE_DEVICE,
    fused: Moves | None = None,
) -> tuple[float, float]:
    """(forward, backward) bytes that the op reads and writes in memory; none for views.

    A lookup reads only what it finds: as many bytes of its table as it writes.
    """
    rule = bound.rule
    if rule.view:
        return 0.0, 0.0
    into, out = flows(op, tensors)
    moves = fused or _alone(op, bound, into, out)
    wants, gives = shardings(bound, strategy, mesh, into, out)
    operands = [_bytes(tensors[n], s, mesh) for n, s in zip(op.inputs, wants, strict=True)]
    results = [_bytes(tensors[n], s, mesh) for n, s in zip(op.outputs, gives, strict=True)]
    forward = float(sum(operands[i] for i in moves.reads) + sum(results[i] for i in moves.writes))
    if rule.cost == "gather" and operands:
        table = _table(op)
        forward += min(sum(results), operands[table]) - operands[table]
    if not any(out) or not any(into):
        return forward, 0.0
    saved = sum(operands[i] for i in moves.saved) + sum(results[i] for i in moves.saved_results)
    kept = sum(kept_bytes(bound, strategy, mesh, worst=False))
    arriving = sum(results[i] for i in moves.arriving)
    leaving = sum(operands[i] for i in moves.leaving)
    return forward + kept, float(saved + kept + arriving + leaving)


def _alone(op: Op, bound: BoundRule, into: Flags, out: Flags) -> Moves:
    """What an op moves that is a kernel of its own: all that it touches."""
    return Moves(
        reads=tuple(range(len(op.inputs))),
        writes=tuple(range(len(op.outputs))),
        saved=bound.rule.saves,
        saved_results=bound.rule.saves_results,
        arriving=tuple(i for i, grad in enumerate(out) if grad),
        leaving=tuple(i for i, grad in enumerate(into) if grad),
    )


def _table(op: Op) -> int:
    """Which operand a lookup looks into: embedding's second, otherwise the first."""
    return 1 if op.kind == "embedding" else 0


def _bytes(tensor: Tensor, sharding: Sharding, mesh: Mesh) -> int:
    return math.prod(sharding.local_shape(tensor.shape, mesh)) * DTYPE_BYTES[tensor.dtype]
