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
from autopar.nouns.sharding import Sharding
from autopar.rules.implementations.kernels import ATTR, kernel_for
from autopar.rules.kept import Chunked, Kept, Streamed
from autopar.rules.notation import BoundRule, Cost, Rule, Term
from autopar.rules.strategies import Strategy, flows, shardings

Flags = tuple[bool, ...]

TILE = 64
"""Rows of a product's tile: kernels fill up what is less."""

PRODUCTS: tuple[Cost, ...] = ("matmul", "attention", "conv")
"""Ops whose rate is that of a device's units for products; the others move bytes."""

ONE_DEVICE = Mesh((), ())
WHOLE_OP = Strategy()


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


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does for an op, once; ``dtype`` is that of the arithmetic.

    ``kind`` is the op's, or ``bias``: the addition of a vector that is a parameter, which the
    product before it makes in the same call. ``launches``: see `Moves`. ``thinness`` and
    ``head_dim``: see `shape`. ``rows``: see `rows_at_once`. ``streamed_bytes``: of the forward,
    beside its products, ``streamed_back_bytes``: of the backward; ``calls``: of products in it.
    ``kernel``: of an attention that runs as one plain call, by which constants it is priced; "":
    the usual ones. ``speed``: of a user's kernel, over that.
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
    """Bytes that move beside products. ``local`` as `shape` has it."""
    return sum(one.bytes_each * math.prod(local[f] for f in one.dims) for one in each)


def _calls(chunked: Chunked, local: Mapping[str, int]) -> int:
    return chunked.products * min(chunked.count, local[chunked.factor])


def workspace_bytes(bound: BoundRule, strategy: Strategy, mesh: Mesh) -> int:
    """What the op holds while its forward runs, beside operands, results and what it keeps."""
    return _held_bytes(bound.rule.workspace, bound, strategy, mesh)


def workspace_back_bytes(bound: BoundRule, strategy: Strategy, mesh: Mesh) -> int:
    """While its backward runs, beside gradients of activations and what it kept."""
    return _held_bytes(bound.rule.workspace_back, bound, strategy, mesh)


def _held_bytes(workspace: Iterable[Kept], bound: BoundRule, strategy: Strategy, mesh: Mesh) -> int:
    if not workspace:
        return 0
    local = extents(bound, strategy, mesh)
    if bound.rule.chunked is not None:
        factor = bound.rule.chunked.factor
        local[factor] = bound.rule.chunked.at_once(local[factor])
    runs_by = strategy.implementations(bound.rule)
    return sum(
        math.prod(local[f] for f in factor_names(bound, w.dims)) * w.itemsize
        for w in workspace
        if w.unless not in runs_by
    )


def rows_at_once(bound: BoundRule, local: Mapping[str, int]) -> int:
    """Rows of all heads of an attention's queries, which its kernel divides between the device's
    processors; 0 of all else. ``local`` as `shape` has it."""
    if bound.rule.cost != "attention":
        return 0
    query, key = (_factors(term) for term in bound.operands[:2])
    (result, *_) = (_factors(term) for term in bound.results)
    return math.prod(local[f] for f in query - ((query & key) - result))


def shape(bound: BoundRule, local: Mapping[str, int]) -> tuple[float, int]:
    """(thinness, head size) of what one rank does: what the rate of its kernel hangs on.

    The `thinness` of a product of m x k and k x n is that of m, n and k, of attention that of its
    keys; of all else it is 0. ``local`` are the factors' `extents`.
    """
    operands = [_factors(term) for term in bound.operands]
    (result, *_) = [_factors(term) for term in bound.results]
    if bound.rule.cost == "attention":
        query, key = operands[:2]
        head_dim = math.prod(local[f] for f in (query & key) - result)
        return thinness([math.prod(local[f] for f in key - query)]), head_dim
    if bound.rule.chunked is not None:
        factor = bound.rule.chunked.factor
        local = {**local, factor: -(-local[factor] // bound.rule.chunked.count)}
    if bound.rule.sides:
        return thinness(_ratio(side, local) for side in bound.rule.sides), 0
    if bound.rule.cost != "matmul" or len(operands) < 2:
        return 0.0, 0
    one, two = operands[:2]
    sides = ((one & result) - two, (two & result) - one, (one & two) - result)
    return thinness(math.prod(local[f] for f in side) for side in sides), 0


def _ratio(side: tuple[tuple[str, ...], tuple[str, ...]], local: Mapping[str, int]) -> float:
    over, under = (math.prod(local[f] for f in names) for names in side)
    return over / under


def thinness(sides: Iterable[float]) -> float:
    """The sum of the inverse sides, those below a tile counted as one."""
    return sum(1 / max(side, TILE) for side in sides)


def _factors(term: Term) -> frozenset[str]:
    return frozenset(f for dim in term for f in dim)


def _kind(op: Op, tensors: Mapping[str, Tensor]) -> str:
    if op.kind == "add" and len(op.inputs) == 2:
        other = tensors[op.inputs[1]]
        if other.role == "parameter" and len(other.shape) == 1:
            return "bias"
    return op.kind


def extents(bound: BoundRule, strategy: Strategy, mesh: Mesh) -> dict[str, int]:
    """The extent of every factor on the rank that has the largest pieces."""
    local = {name: factor.size for name, factor in bound.factors.items()}
    for axis, choice in strategy.choices:
        for name in bound.splits(choice):
            local[name] = -(-local[name] // mesh.size(axis))
    return local


def split_ways(strategy: Strategy, mesh: Mesh) -> dict[str, int]:
    """How many ways each choice splits what it does."""
    ways: dict[str, int] = {}
    for axis, choice in strategy.choices:
        ways[choice] = ways.get(choice, 1) * mesh.size(axis)
    return ways


def flops(
    bound: BoundRule,
    op: Op,
    tensors: Mapping[str, Tensor],
    strategy: Strategy = WHOLE_OP,
    mesh: Mesh = ONE_DEVICE,
) -> tuple[float, float]:
    """(forward, backward) floating-point operations; of the whole op where no strategy is given."""
    rule, local = bound.rule, extents(bound, strategy, mesh)
    terms = rule.flop_terms or ((rule.flops, tuple(local)),)
    forward = sum(c * math.prod(local[name] for name in names) for c, names in terms)
    forward *= most_work(rule, split_ways(strategy, mesh)) if rule.implementations else 1.0
    forward *= busiest(bound, strategy, mesh)
    into, out = flows(op, tensors)
    if not any(out) or not any(into):
        return forward, 0.0
    if rule.cost in ("matmul", "conv") and not rule.again:
        chosen = into if rule.products is None else [into[i] for i in rule.products]
        return forward, forward * sum(chosen)
    return forward, forward * rule.backward


def again_share(bound: BoundRule, strategy: Strategy, mesh: Mesh) -> float:
    """Of the forward, what a backward does once more."""
    again, terms = bound.rule.again, bound.rule.flop_terms
    if not again:
        return 0.0
    local = extents(bound, strategy, mesh)
    one, whole = (
        sum(c * math.prod(local[name] for name in names) for c, names in some)
        for some in (again, terms)
    )
    return one / whole


def most_work(rule: Rule, ways: Mapping[str, int]) -> float:
    """What the rank that has most does of an op, times an equal share. ``ways``: by choice."""
    split = ((each, ways.get(each.choice, 1)) for each in rule.implementations)
    return math.prod(each.work(n) for each, n in split if n > 1)


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


def kept_bytes(
    bound: BoundRule,
    strategy: Strategy = WHOLE_OP,
    mesh: Mesh = ONE_DEVICE,
    *,
    worst: bool = True,
) -> list[int]:
    """Bytes of each tensor that the op makes and keeps for its backward pass, in the worst step or
    in the mean of steps.

    ``...`` in a rule's `Kept` stands for all dims of its ellipsis.
    """
    local, share = extents(bound, strategy, mesh), kept_share(bound.rule, strategy, mesh)
    rows = [busiest(bound, strategy, mesh, worst=worst, home=home) for home in (False, True)]
    return [
        round(
            math.prod(local[f] for f in factor_names(bound, kept.dims))
            * kept.itemsize
            * share
            * rows[kept.home]
        )
        for kept in bound.rule.keeps
    ]


def busiest(
    bound: BoundRule, strategy: Strategy, mesh: Mesh, *, worst: bool = False, home: bool = False
) -> float:
    """Rows of the rank that most are routed to, over those of a rank in the mean; ``home``: of
    those that come from it, which are uneven where they all stay on it alone."""
    routed = bound.rule.routed
    if routed is None:
        return 1.0
    splits = ((axis, bound.splits(choice)) for axis, choice in strategy.choices)
    over = [a for a, split in splits if routed.factor in split and not (home and len(split) > 1)]
    experts = bound.factors[routed.factor].size
    return routed.busiest(experts, mesh.ways(over), worst=worst)


def kept_share(rule: Rule, strategy: Strategy, mesh: Mesh) -> float:
    """Of what an op makes for its backward, as its pieces would have it, what it makes."""
    ways = split_ways(strategy, mesh) if rule.implementations else {}
    split = ((each.row, ways.get(each.choice, 1)) for each in rule.implementations)
    return math.prod(row.keeps(n) for row, n in split if n > 1)


def factor_names(bound: BoundRule, dims: tuple[str, ...]) -> tuple[str, ...]:
    """``dims`` with ``...`` written out as the factors it stands for."""
    names: list[str] = []
    for name in dims:
        if name == "...":
            names += [f for f in bound.factors if f[0] == "e" and f[1:].isdigit()]
        else:
            names.append(name)
    return tuple(names)


def _table(op: Op) -> int:
    """Which operand a lookup looks into: embedding's second, otherwise the first."""
    return 1 if op.kind == "embedding" else 0


def _bytes(tensor: Tensor, sharding: Sharding, mesh: Mesh) -> int:
    return math.prod(sharding.local_shape(tensor.shape, mesh)) * DTYPE_BYTES[tensor.dtype]


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
