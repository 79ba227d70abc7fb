"""What it takes to run a tensor-parallel collective in pieces beside the products next to it.

The products in pieces of rows may fill a device's processors less than all rows do; the formula is
that of `autopar.pricing.in_pieces`. What is hidden is taken off the collective: products are priced
as ever.

In backward the gradients of weights are products of all rows. A reduction hides behind these too;
a gather, whose gradient they read, behind those of inputs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.kernels.pieces import wave_share
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.pieces import (
    BEFORE,
    KINDS,
    SCATTERED,
    Layers,
    Site,
    extent,
    factors_for,
    kind_of,
    sites,
    takes,
)
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Op, Tensor
from autopar.nouns.plan import key
from autopar.nouns.sharding import Sharding
from autopar.pricing.in_pieces import ONE, WORTH, Laid, laid_beside
from autopar.pricing.prices import PICOSECONDS, Prices
from autopar.rules.extents import extents
from autopar.rules.notation import BoundRule
from autopar.rules.resharding import Collective, Step, collectives
from autopar.rules.strategies import Strategy

Products = Sequence[tuple[Op, BoundRule]]
Ends = tuple[Sharding, Sharding]
"""How a tensor is before and behind its resharding."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A collective each way and the products beside it on a rank.

    compute_ps: forward and backward of the products together; ``outputs``: of each, on a rank.
    """

    kind: str
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    part: int
    rows: int
    compute_ps: tuple[int, int]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Priced:
    """In so many pieces, picoseconds that the collective adds to its products, both ways."""

    pieces: int
    forward_ps: int
    backward_ps: int

    @property
    def total_ps(self) -> int:
        return self.forward_ps + self.backward_ps


def beside(
    prices: Prices,
    step: Step,
    dtype: str,
    products: Products,
    sharding: Sharding,
    tensors: Mapping[str, Tensor],
    scope: str | None,
) -> Beside | None:
    """What a step of a tensor of ``dtype`` is next to; None where no pieces can be.

    ``sharding``: of what ``products`` read, or of what they give; their strategies follow from it.
    """
    kind = KINDS[step.source.kind, step.target.kind]
    cut = extent(kind, step, prices.mesh)
    if cut is None or not products:
        return None
    forward = backward = 0
    outputs = []
    for op, bound in products:
        strategy = strategy_of(bound, sharding, step.axis, kind)
        local = extents(bound, strategy, prices.mesh)
        outputs.append(local[bound.operands[1][0][0]])
        run = prices.compute(LoweredOp(op, bound, strategy, (), ()), tensors, scope)
        forward, backward = forward + run[0], backward + run[1]
    there, back = (
        tuple(collectives((step,), dtype, prices.mesh, way)) for way in ("forward", "backward")
    )
    return Beside(kind, there, back, *cut, (forward, backward), tuple(outputs))


def strategy_of(bound: BoundRule, sharding: Sharding, axis: str, kind: str) -> Strategy:
    """What a linear layer does that reads, or gives, a tensor of this sharding; of ``axis`` what
    the step is for."""
    term = bound.operands[0] if kind in BEFORE else bound.results[0]
    choices = []
    for name, placed in sharding.placements:
        if name == axis:
            choices.append((name, factors_for(kind, bound)[0]))
        elif placed.kind == "S" and term[placed.dim]:
            choices.append((name, term[placed.dim][0]))
        elif placed.kind == "D" and kind in BEFORE:
            choices.append((name, bound.operands[1][0][0]))
        elif placed.kind == "P" and kind not in BEFORE:
            choices.append((name, bound.operands[0][-1][0]))
    return Strategy(tuple(choices))


def best(prices: Prices, one: Beside) -> Priced:
    """In as many pieces as take the least time, of those that `Prices.pieces` has."""
    known = prices.in_pieces.get(one)
    if known is None:
        known = prices.in_pieces[one] = _best(prices, one)
    return known


def _best(prices: Prices, one: Beside) -> Priced:
    plain = priced(prices, one, 1)
    every = [priced(prices, one, n) for n in prices.pieces if takes(one.part, one.rows, n)]
    if 1 not in prices.pieces:  # pinned
        return every[0] if every else plain
    fastest = min(every, key=lambda p: (p.total_ps, p.pieces))
    worth = WORTH * (sum(one.compute_ps) + plain.total_ps)
    return fastest if plain.total_ps - fastest.total_ps >= worth else plain


def priced(prices: Prices, one: Beside, pieces: int) -> Priced:
    """In so many pieces, whether that is wise or not."""
    there, back = laid(prices, one, pieces)
    return Priced(pieces, there.added_ps, back.added_ps)


def laid(prices: Prices, one: Beside, pieces: int) -> tuple[Laid, Laid]:
    """Forward and backward. Where the gradients of weights wait for all of what a gather gives,
    backward is the other half alone."""
    forward, backward = one.compute_ps
    thin = _thinness(prices.cluster, one, pieces)
    if one.kind == SCATTERED:
        there, back = (forward, thin), (backward // 2, thin)
    else:  # half of a backward is made in pieces
        there, back = (forward, thin), (backward, (1 + thin) / 2)
    return _laid(prices, one.forward, *there, pieces), _laid(prices, one.backward, *back, pieces)


def _laid(
    prices: Prices, moved: Sequence[Collective], compute_ps: int, thin: float, pieces: int
) -> Laid:
    whole_s = compute_ps / PICOSECONDS
    if pieces == 1 or not moved:
        moved_s = sum(map(prices.collective, moved)) / PICOSECONDS
        return Laid(whole_s, whole_s, moved_s, whole_s + moved_s)
    small = [replace(c, size_bytes=-(-c.size_bytes // pieces)) for c in moved]
    moved_s = pieces * sum(map(prices.collective, small)) / PICOSECONDS
    given = whole_s, thin * whole_s, moved_s
    return laid_beside(prices.cluster, prices.mesh, moved[0].axis, pieces, *given)


def _thinness(cluster: Cluster, one: Beside, pieces: int) -> float:
    """How much longer products of 1/n of the rows take together, where they fill processors less;
    each weighs as much as it has outputs."""
    if pieces == 1 or cluster.levels[-1].library == "gloo":
        return 1.0
    device, rows = cluster.device, one.rows
    shares = [
        (n, wave_share(device, rows, n) / wave_share(device, max(1, rows // pieces), n))
        for n in one.outputs
    ]
    return max(1.0, sum(n * share for n, share in shares) / sum(one.outputs))


def site_beside(prices: Prices, site: Site, lowered: Lowered) -> Beside | None:
    """`beside` of a site of a lowered graph."""
    tensors, value = lowered.graph.tensors, lowered.tensors[site.name]
    products = [(op.op, op.bound) for op in site.products if op.bound is not None]
    sharding = site.products[0].operands[0].wanted if site.kind in BEFORE else value.produced
    return beside(prices, site.step, value.tensor.dtype, products, sharding, tensors, lowered.block)


def saved_ps(prices: Prices, one: Beside | None) -> int:
    """Picoseconds that the best count of pieces takes less than one. Pinned pieces that lose count
    as one: a pin is no reason to split ops otherwise, so that there is nothing left to cut."""
    if one is None:
        return 0
    return max(0, priced(prices, one, 1).total_ps - best(prices, one).total_ps)


def saved_on_the_way(
    prices: Prices, lowered: Lowered, layers: Layers, name: str, steps: Sequence[Step], at: Ends
) -> int:
    """Picoseconds that a tensor's resharding may take less in pieces, wherever its ends leave it to
    the search."""
    tensor = lowered.graph.tensors[name]
    kind = kind_of(steps[0]) if len(steps) == 1 else None
    if prices.pieces == ONE or kind is None or not tensor.differentiable:
        return 0
    bounds = {op.op.name: op.bound for op in lowered.ops}
    every = ((op, bounds[op.name]) for op in layers.beside(name, kind))
    products = [(op, bound) for op, bound in every if bound is not None]
    sharding = at[1] if kind in BEFORE else at[0]
    given = (products, sharding, lowered.graph.tensors, lowered.block)
    return saved_ps(prices, beside(prices, steps[0], tensor.dtype, *given))


def chosen(prices: Prices, every: Iterable[tuple[Site, Lowered]]) -> dict[str, int]:
    """In how many pieces each site is fastest, by key; what runs in one is left out. A layer that
    lies between two sites is in pieces at the one where they save more."""
    if prices.pieces == ONE:
        return {}
    gaining = []
    for site, lowered in every:
        one = site_beside(prices, site, lowered)
        if one is not None and (count := best(prices, one).pieces) > 1:
            gaining.append((saved_ps(prices, one), site, count))
    taken: set[tuple[str | None, str]] = set()
    pieces = {}
    for _, site, count in sorted(gaining, key=lambda f: (-f[0], f[1].key)):
        scope = site.key.rpartition("::")[0]
        names = {(scope, op.op.name) for op in site.products}
        if not names & taken:
            taken |= names
            pieces[site.key] = count
    return dict(sorted(pieces.items()))


@dataclass(frozen=True, slots=True)
class InPieces:
    """By tensor of one graph, what its collective adds to the products beside it in as many pieces
    as the plan has, picoseconds both ways."""

    by_name: Mapping[str, Priced]

    @staticmethod
    def of(lowered: Lowered, prices: Prices) -> InPieces:
        by_name = {}
        for site in sites(lowered) if lowered.pieces else ():
            count = lowered.pieces.get(site.key, 1)
            one = site_beside(prices, site, lowered) if count > 1 else None
            if one is not None:
                by_name[site.name] = priced(prices, one, count)
        return InPieces(by_name)

    @staticmethod
    def by_key(lowered: Lowered, prices: Prices) -> dict[str, Priced]:
        """Of a graph and its blocks, by the plan's keys."""
        return {
            key(body.block, name): one
            for body in (lowered, *lowered.blocks.values())
            for name, one in InPieces.of(body, prices).by_name.items()
        }

    def moved(self, name: str, steps: Sequence[Step], usual: tuple[int, int]) -> tuple[int, int]:
        """Forward and backward of a tensor's resharding; ``usual``: in one piece."""
        one = self.by_name.get(name) if steps else None
        return usual if one is None else (one.forward_ps, one.backward_ps)
