"""The price of one op under its strategy, with the collectives inside of it.

Tokens that travel to their experts may do so in pieces (`autopar.lowering.routed_pieces`), by the
formula of `autopar.pricing.in_pieces`: products of pieces are thinner and read the matrices once a
piece, what travels are both all-to-alls, and in backward every piece but the first adds its
gradients of the matrices to those of the others. What is hidden is taken off the collectives: the
op computes as ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from autopar.lowering.issued import Inside, internal_collectives
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.routed_pieces import axis_of, of_a_piece, pieces_of, sites, takes
from autopar.nouns.graph import DTYPE_BYTES, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.pricing.in_pieces import ONE, WORTH, Laid, laid_beside
from autopar.pricing.narrow import settled_op
from autopar.pricing.prices import PICOSECONDS, Prices
from autopar.rules.extents import extents
from autopar.rules.resharding import Collective

Tensors = Mapping[str, Tensor]


def op_ps(prices: Prices, op: LoweredOp, tensors: Tensors, scope: str | None) -> int:
    """Picoseconds of an op under its strategy, both ways, with its own collectives, in the fastest
    of what it may choose among. ``scope``: the block whose body it lies in."""
    device = prices.cluster.device
    op = settled_op(op, tensors, prices.mesh, device, prices.collective_s)
    return sum(prices.compute(op, tensors, scope)) + sum(inside_ps(prices, op, tensors, scope))


def inside_ps(
    prices: Prices, op: LoweredOp, tensors: Tensors, scope: str | None, pieces: int | None = None
) -> tuple[int, int]:
    """(forward, backward) picoseconds of the op's own collectives that compute leaves bare.

    ``pieces``: in which its tokens travel to experts; None: in as many as are fastest.
    """
    if pieces is None:
        pieces = fastest(prices, op, tensors, scope)
    if pieces == 1:
        return prices.inside(op, tensors, scope)
    forward, backward = laid(prices, op, tensors, scope, pieces)
    return forward.added_ps, backward.added_ps


def fastest(prices: Prices, op: LoweredOp, tensors: Tensors, scope: str | None) -> int:
    """In how many pieces the tokens of an op travel fastest, of what `Prices.expert_pieces` has;
    pinned pieces that it does not take are one."""
    if prices.expert_pieces == ONE or axis_of(op, prices.mesh) is None:
        return 1
    asked = (key(scope, op.op.name), op.strategy)
    known: int | None = prices.in_pieces.get(asked)
    if known is None:
        known = prices.in_pieces[asked] = _fastest(prices, op, tensors, scope)
    return known


def _fastest(prices: Prices, op: LoweredOp, tensors: Tensors, scope: str | None) -> int:
    counts = [n for n in prices.expert_pieces if takes(op, prices.mesh, n)]
    if 1 not in prices.expert_pieces:  # pinned
        return counts[0] if counts else 1
    bare = {n: sum(inside_ps(prices, op, tensors, scope, n)) for n in counts}
    best = min(counts, key=lambda n: (bare[n], n))
    worth = WORTH * (sum(prices.compute(op, tensors, scope)) + bare[1])
    return best if bare[1] - bare[best] >= worth else 1


def chosen(prices: Prices, every: Iterable[tuple[str, LoweredOp, Lowered]]) -> dict[str, int]:
    """By key, in how many pieces tokens travel fastest; those that travel at once are left out."""
    if prices.expert_pieces == ONE:
        return {}
    counts = {
        where: fastest(prices, op, part.graph.tensors, part.block) for where, op, part in every
    }
    return {where: n for where, n in sorted(counts.items()) if n > 1}


def bare_each(prices: Prices, lowered: Lowered) -> dict[tuple[str, str, Collective], float]:
    """Of ops whose tokens travel in pieces, by key, direction and collective: seconds that compute
    leaves bare of each all-to-all of rows."""
    bare = {}
    for where, op, part in sites(lowered):
        pieces = pieces_of(part, op)
        if pieces == 1:
            continue
        ways = laid(prices, op, part.graph.tensors, part.block, pieces)
        travelling = [
            i for i in internal_collectives(op, part.mesh, pieces) if _hides(i, op, part.mesh)
        ]
        for inside in travelling:
            there = sum(i.times for i in travelling if i.direction == inside.direction)
            one = ways[0] if inside.direction == "forward" else ways[1]
            bare[where, inside.direction, inside.collective] = one.bare_s / there
    return bare


def _hides(inside: Inside, op: LoweredOp, mesh: Mesh) -> bool:
    """Whether it moves rows of pieces, which those of others may hide."""
    return inside.collective.axis == axis_of(op, mesh) and inside.times > 1


def laid(
    prices: Prices, op: LoweredOp, tensors: Tensors, scope: str | None, pieces: int
) -> tuple[Laid, Laid]:
    """Forward and backward in so many pieces, whether that is wise or not."""
    axis = axis_of(op, prices.mesh)
    assert axis is not None, f"{op.op.name}: its tokens do not travel along one axis"
    travelling = {"forward": 0, "backward": 0}
    others = dict(travelling)
    for inside in internal_collectives(op, prices.mesh, pieces):
        taken = inside.times * prices.collective(inside.largest)
        hides = _hides(inside, op, prices.mesh)
        (travelling if hides else others)[inside.direction] += taken
    others["backward"] += (pieces - 1) * prices.added(_matrix_bytes(op, prices, tensors))
    whole = prices.compute(op, tensors, scope)
    smaller, mesh = of_a_piece(op, prices.mesh, pieces)
    piece = prices.on(mesh).compute(smaller, tensors, scope)
    forward, backward = (
        laid_beside(
            prices.cluster,
            prices.mesh,
            axis,
            pieces,
            at_once / PICOSECONDS,
            pieces * each / PICOSECONDS,
            travelling[way] / PICOSECONDS,
            others[way] / PICOSECONDS,
        )
        for way, at_once, each in zip(("forward", "backward"), whole, piece, strict=True)
    )
    return forward, backward


def _matrix_bytes(op: LoweredOp, prices: Prices, tensors: Tensors) -> int:
    """Of the gradients of a rank's matrices and biases."""
    assert op.bound is not None
    local = extents(op.bound, op.strategy, prices.mesh)
    total = 0
    for name, term in zip(op.op.inputs, op.bound.operands, strict=True):
        tensor = tensors[name]
        if tensor.role == "parameter" and tensor.differentiable:
            numel = math.prod(local[factor] for dim in term for factor in dim)
            total += numel * DTYPE_BYTES[tensor.dtype]
    return total
