"""The work of one op: floating-point operations and bytes moved, whole or on one device.

Forward work is the rule's operations times the points of its iteration space. Backward, a matrix
product or convolution is one such product for each operand that has a gradient; other rules say a
multiple of the forward. Bytes are what an op reads and writes: where it runs alone, operands and
results forward; saved tensors, the results' gradients and the operands' gradients backward. In a
fused kernel they are what `autopar.rules.fusion` leaves it to move. Under a strategy every factor
has the extent of the largest piece, so these are the figures of the rank that has most to do; where
rows are routed unevenly, those of the rank that most go to: in the mean of steps what it does, in
the worst step what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.rules.extents import extents
from autopar.rules.flops import again_share, flops
from autopar.rules.implementations.kernels import ATTR, kernel_for
from autopar.rules.kept import Chunked, Streamed
from autopar.rules.moved_bytes import Moves, bytes_moved
from autopar.rules.notation import BoundRule, Cost
from autopar.rules.strategies import Strategy
from autopar.rules.work_shape import rows_at_once, shape

PRODUCTS: tuple[Cost, ...] = ("matmul", "attention", "conv")
"""Ops whose rate is that of a device's units for products; the others move bytes."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does for an op, once; ``dtype`` is that of the arithmetic.

    ``kind`` is the op's, or ``bias``: the addition of a vector that is a parameter, which the
    product before it makes in the same call. ``launches``: see `Moves`. ``thinness`` and
    ``head_dim``: see `shape`. ``rows``: see `rows_at_once`. ``streamed_bytes``: of the forward,
    beside its products, ``streamed_back_bytes``: of the backward; ``calls``: of products in it.
    ``kernel``: of an attention that runs as one plain call, by which constants it is priced; "":
    the usual ones. ``speed``: of a user's kernel, over that. ``bodies``: of an op with bodies what
    the ops in each do at each of so many ``times``, of which the dearest counts and nothing else;
    ``again``: backward runs their forward once more.
    """

    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    dtype: str
    cost: Cost
    kind: str = ""
    launches: tuple[bool, bool] = (True, True)
    thinness: float = 0.0
    head_dim: int = 0
    rows: int = 0
    streamed_bytes: float = 0.0
    streamed_back_bytes: float = 0.0
    calls: int = 1
    kernel: str = ""
    speed: float = 1.0
    bodies: tuple[tuple[Work, ...], ...] = ()
    times: int = 1
    again: bool = False


def op_work(
    op: Op,
    bound: BoundRule,
    strategy: Strategy,
    mesh: Mesh,
    tensors: Mapping[str, Tensor],
    fused: Moves | None = None,
) -> Work:
    """The work of ``op`` on one rank of ``mesh`` under ``strategy``; ``fused``: in a kernel."""
    forward, backward = flops(bound, op, tensors, strategy, mesh)
    local = extents(bound, strategy, mesh)
    if backward:
        backward += forward * again_share(bound, strategy, mesh)
    thinness, head_dim = shape(bound, local)
    read, read_back = bytes_moved(bound, op, tensors, strategy, mesh, fused)
    return Work(
        forward,
        backward,
        read,
        read_back,
        arithmetic_dtype(op, tensors, bound.rule.cost),
        bound.rule.cost,
        _kind(op, tensors),
        (True, True) if fused is None else fused.launches,
        thinness,
        head_dim,
        rows_at_once(bound, local),
        _streamed(bound.rule.streams, local),
        _streamed(bound.rule.streams_back, local),
        1 if bound.rule.chunked is None else _calls(bound.rule.chunked, local),
        *_kernel(op, bound, strategy),
    )


def _kernel(op: Op, bound: BoundRule, strategy: Strategy) -> tuple[str, float]:
    """(constants, speed) of the kernel that the op runs by, where it is one plain call."""
    row = kernel_for(op) if ATTR in op.attrs else None
    return (
        ("", 1.0) if row is None or strategy.implementations(bound.rule) else (row.rate, row.speed)
    )


def _streamed(each: Iterable[Streamed], local: Mapping[str, int]) -> float:
    """Bytes that move beside products. ``local``: the factors' `extents`."""
    return sum(one.bytes_each * math.prod(local[f] for f in one.dims) for one in each)


def _calls(chunked: Chunked, local: Mapping[str, int]) -> int:
    return chunked.products * min(chunked.count, local[chunked.factor])


def _kind(op: Op, tensors: Mapping[str, Tensor]) -> str:
    if op.kind == "add" and len(op.inputs) == 2:
        other = tensors[op.inputs[1]]
        if other.role == "parameter" and len(other.shape) == 1:
            return "bias"
    return op.kind


def arithmetic_dtype(op: Op, tensors: Mapping[str, Tensor], cost: Cost) -> str:
    """The dtype that the op computes in.

    The first operand with a fraction has it, else the first result. Products take the widest of
    their operands, or the result's where that is narrower: parameters and buffers are stored in
    another dtype than they are used in, so only values of the stream say what it is.
    """
    result = tensors[op.outputs[0]].dtype
    operands = [tensors[name] for name in op.inputs if "float" in tensors[name].dtype]
    if cost not in PRODUCTS:
        return operands[0].dtype if operands else result
    stream = [t.dtype for t in operands if t.role not in ("parameter", "buffer")]
    if not stream or "float" not in result:
        return result
    widest = max(stream, key=DTYPE_BYTES.__getitem__)
    return min(widest, result, key=DTYPE_BYTES.__getitem__)
