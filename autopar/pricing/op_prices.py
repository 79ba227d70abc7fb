"""The price of one op under its strategy, with the collectives inside of it.

Tokens that travel to their experts may do so in pieces (`autopar.lowering.routed_pieces`), by the
formula of `autopar.pricing.in_pieces`: products of pieces are thinner and read the matrices once a
piece, what travels are both all-to-alls, and in backward every piece but the first adds its
gradients of the matrices to those of the others. What is hidden is taken off the collectives: the
op computes as ever.

Of a piece's way out the first hop is hidden by nothing of the op's own: a module that runs beside
it does (`autopar.lowering.shared_experts`), as far as it computes so long, and in backward the
hop that brings home the gradients of the first piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.lowering.issued import Inside, internal_collectives
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.routed_pieces import axis_of, of_a_piece, pieces_of, takes
from autopar.lowering.routed_pieces import sites as routed_sites
from autopar.lowering.shared_experts import beside_of, sites, with_beside
from autopar.nouns.graph import DTYPE_BYTES, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.problem import NO_LIMIT
from autopar.pricing.in_pieces import ONE, WORTH, Laid, laid_beside, overhead
from autopar.pricing.narrow import settled_op
from autopar.pricing.prices import PICOSECONDS, Prices
from autopar.rules.extents import extents
from autopar.rules.resharding import Collective

Tensors = Mapping[str, Tensor]
Both = tuple[int, int]
NOTHING, UNKNOWN = (0, 0), (NO_LIMIT, NO_LIMIT)
"""Picoseconds of what runs beside: none does; one that may take as long as it likes."""
ALL_TO_ALL, WAYS = "all_to_all", ("forward", "backward")


def op_ps(prices: Prices, op: LoweredOp, tensors: Tensors, scope: str | None) -> int:
    """Picoseconds of an op under its strategy, both ways, with its own collectives, in the fastest
    of what it may choose among: where a module may run beside it, as if that took long enough.
    ``scope``: the block whose body it lies in."""
    device = prices.cluster.device
    op = settled_op(op, tensors, prices.mesh, device, prices.collective_s)
    beside = UNKNOWN if key(scope, op.op.name) in prices.beside else NOTHING
    inside = inside_ps(prices, op, tensors, scope, beside=beside)
    return sum(prices.compute(op, tensors, scope)) + sum(inside)


def inside_of(prices: Prices, lowered: Lowered, op: LoweredOp) -> Both:
    """`inside_ps` of an op of a lowered graph, as its plan runs it."""
    tensors, scope = lowered.graph.tensors, lowered.block
    beside = computed_beside(prices, beside_of(lowered, op), lowered)
    return inside_ps(prices, op, tensors, scope, pieces_of(lowered, op), beside)


def inside_ps(
    prices: Prices,
    op: LoweredOp,
    tensors: Tensors,
    scope: str | None,
    pieces: int | None = None,
    beside: Both = NOTHING,
) -> Both:
    """(forward, backward) picoseconds of the op's own collectives that compute leaves bare.

    ``pieces``: in which its tokens travel to experts; None: in as many as are fastest. ``beside``:
    how long what runs beside the first of them computes.
    """
    if pieces is None:
        pieces = fastest(prices, op, tensors, scope)
    if pieces == 1:
        usual = prices.inside(op, tensors, scope)
    else:
        forward, backward = laid(prices, op, tensors, scope, pieces)
        usual = forward.added_ps, backward.added_ps
    saved = _saved(prices, op, usual, pieces, beside)
    return usual[0] - saved[0], usual[1] - saved[1]


def _saved(prices: Prices, op: LoweredOp, bare: Both, pieces: int, beside: Both) -> Both:
    """Picoseconds that the first piece's hop out takes less, and its gradients' hop home: what is
    hidden, less what that takes of the compute which hides it."""
    axis = axis_of(op, prices.mesh)
    if axis is None or beside == NOTHING:
        return NOTHING
    hops = dict.fromkeys(WAYS, 0)
    for inside in _travelling(prices, op, pieces):
        hops[inside.direction] = max(hops[inside.direction], prices.collective(inside.largest))
    _, contention = overhead(prices.cluster, prices.mesh, axis)
    gain = max(0.0, 1.0 - contention)
    hidden = (min(there) for there in zip(hops.values(), bare, beside, strict=True))
    ahead, back = (round(gain * one) for one in hidden)
    return ahead, back


def computed_beside(prices: Prices, ops: Iterable[LoweredOp], lowered: Lowered) -> Both:
    """(forward, backward) picoseconds that a module beside computes."""
    each = [prices.compute(op, lowered.graph.tensors, lowered.block) for op in ops]
    return sum(ahead for ahead, _ in each), sum(back for _, back in each)


def chosen_beside(prices: Prices, lowered: Lowered) -> dict[str, str]:
    """By key, the modules that run beside routed experts where that gains; of those that are
    pinned all, or none."""
    if prices.runs_beside is False:
        return {}
    taken = {}
    for where, op, path, part in sites(lowered):
        bare = inside_ps(prices, op, part.graph.tensors, part.block, pieces_of(part, op))
        ops = beside_of(with_beside(part, {where: path}), op)
        saved = _saved(prices, op, bare, pieces_of(part, op), computed_beside(prices, ops, part))
        whole = sum(prices.compute(op, part.graph.tensors, part.block)) + sum(bare)
        if prices.runs_beside or sum(saved) >= WORTH * whole:
            taken[where] = path
    return taken


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
    """Of ops whose tokens travel in pieces or beside a module, by key, direction and collective:
    seconds that compute leaves bare of each all-to-all of rows."""
    bare: dict[tuple[str, str, Collective], float] = {}
    for where, op, part in routed_sites(lowered):
        pieces, beside = pieces_of(part, op), beside_of(part, op)
        if pieces == 1 and not beside:
            continue
        travelling = [*_travelling(prices, op, pieces)]
        for way, one_ps in zip(WAYS, _bare(prices, part, op, pieces, beside), strict=True):
            some = [inside for inside in travelling if inside.direction == way]
            hops = sum(inside.times for inside in some)
            bare |= {(where, way, i.collective): one_ps / hops / PICOSECONDS for i in some}
    return bare


def _bare(
    prices: Prices, part: Lowered, op: LoweredOp, pieces: int, beside: Sequence[LoweredOp]
) -> Both:
    """Of all hops of an op, both ways."""
    tensors, scope = part.graph.tensors, part.block
    if pieces > 1:
        forward, backward = laid(prices, op, tensors, scope, pieces)
        bare = forward.bare_s * PICOSECONDS, backward.bare_s * PICOSECONDS
    else:
        hops = [*_travelling(prices, op, pieces)]
        ahead, back = (
            sum(i.times * prices.collective(i.largest) for i in hops if i.direction == way)
            for way in WAYS
        )
        bare = ahead, back
    usual = inside_ps(prices, op, tensors, scope, pieces)
    saved = _saved(prices, op, usual, pieces, computed_beside(prices, beside, part))
    return round(bare[0] - saved[0]), round(bare[1] - saved[1])


def _travelling(prices: Prices, op: LoweredOp, pieces: int) -> Iterator[Inside]:
    """The all-to-alls of rows, without those of how many they are."""
    axis = axis_of(op, prices.mesh)
    for inside in internal_collectives(op, prices.mesh, pieces):
        moved = inside.collective
        if moved.kind == ALL_TO_ALL and moved.axis == axis and "int" not in inside.dtype:
            yield inside


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
        for way, at_once, each in zip(WAYS, whole, piece, strict=True)
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
