"""The ops of one unit in the order in which they run, and the collectives between and inside them.

What `autopar.pricing.summary` adds up, laid out: compute on one stream, collectives over model axes
on another. These wait for one another, unless a plan runs a collective in pieces beside products
(`autopar.pricing.tp_pieces`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.lowering.issued import internal_collectives
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.pieces import BEFORE, SCATTERED, Site, sites
from autopar.lowering.routed_pieces import pieces_of
from autopar.nouns.plan import key
from autopar.pricing.in_pieces import Laid
from autopar.pricing.op_prices import inside_of
from autopar.pricing.parameters import parameters_of
from autopar.pricing.prices import PICOSECONDS, Prices
from autopar.pricing.summary import adding
from autopar.pricing.tp_pieces import Beside, laid, site_beside
from autopar.rules.resharding import Collective, Step, collectives

Stream = Literal["compute", "model axes"]
Way = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class OpSpan:
    """What runs when, in seconds from the start of its unit. ``moved``: of a collective, the bytes
    of one of its pieces."""

    what: str
    stream: Stream
    start_s: float
    end_s: float
    moved_bytes: int = 0

    def later(self, by_s: float) -> OpSpan:
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)


@dataclass(frozen=True, slots=True)
class _Run:
    """An op or a collective, which nothing runs beside; picoseconds forward and backward."""

    what: tuple[str, str]
    stream: Stream
    picoseconds: tuple[int, int]
    moved_bytes: tuple[int, int] = (0, 0)

    def spans(self, way: int) -> list[OpSpan]:
        taken_s = self.picoseconds[way] / PICOSECONDS
        if not taken_s:
            return []
        return [OpSpan(self.what[way], self.stream, 0.0, taken_s, self.moved_bytes[way])]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A collective in pieces beside the products next to it; ``compute_ps``: of these."""

    site: Site
    beside: Beside
    count: int
    laid: tuple[Laid, Laid]

    def spans(self, way: int) -> list[OpSpan]:
        """Backward of what is scattered, gradients of weights wait for all of what is gathered."""
        one, moved = self.laid[way], (self.beside.forward, self.beside.backward)[way]
        names = [_module(op) for op in self.site.products]
        what = ", ".join(names)
        count = self.count if moved else 1
        first = (self.site.kind in BEFORE) == (way == 0)
        compute_s, moved_s = one.products_s / count, one.moved_s / count
        spans: list[OpSpan] = []
        ready = done = 0.0
        for piece in range(count):
            part = f" ({piece + 1} of {count})" if count > 1 else ""
            if first and moved:
                ready += moved_s
                spans.append(_moving(moved, part, ready - moved_s, ready, count))
            start = max(done, ready) if first else done
            done = start + compute_s
            spans.append(OpSpan(f"{what}{part}", "compute", start, done))
            if not first and moved:
                ready = max(ready, done) + moved_s
                spans.append(_moving(moved, part, ready - moved_s, ready, count))
        done = max(done, ready)
        if one.time_s > done:
            shared = OpSpan("pieces: launches, shared memory", "compute", done, one.time_s)
            spans.append(shared)
        if way and self.site.kind == SCATTERED:
            weights_s = self.beside.compute_ps[1] / PICOSECONDS - one.whole_s
            spans.append(OpSpan(f"{what}: weights", "compute", one.time_s, one.time_s + weights_s))
        return spans


def op_spans(lowered: Lowered, prices: Prices, way: Way) -> tuple[list[OpSpan], float]:
    """One pass through a graph without its blocks, and the seconds that it takes.

    Backward is the forward's order turned round; gradients are added up behind it.
    """
    runs = [*_runs(lowered, prices)]
    direction = 0 if way == "forward" else 1
    spans: list[OpSpan] = []
    now_s = 0.0
    for run in runs if way == "forward" else reversed(runs):
        own = [span.later(now_s) for span in run.spans(direction)]
        now_s = max((span.end_s for span in own), default=now_s)
        spans += own
    if way == "backward":
        added_s = adding(parameters_of(lowered)[0], prices) / PICOSECONDS
        spans += [OpSpan("gradients added up", "compute", now_s, now_s + added_s)] * (added_s > 0)
        now_s += added_s
    return spans, now_s


def _runs(lowered: Lowered, prices: Prices) -> Iterator[_Run | _Pieces]:
    """In the forward's order."""
    cut = _in_pieces(lowered, prices)
    beside = {op.op.name: one for one in cut.values() for op in one.site.products}
    makes = {name for op in lowered.ops for name in op.op.outputs}

    def moved(name: str, steps: Sequence[Step], grad: bool, handed: bool) -> Iterator[_Run]:
        if steps and name not in cut:
            yield _resharded(lowered, prices, name, tuple(steps), grad, handed)

    handed = prices.fusion.handed
    for name, value in lowered.tensors.items():
        if name not in makes:
            is_handed = key(lowered.block, name) in handed
            yield from moved(name, value.steps, value.tensor.differentiable, is_handed)
    for op in lowered.ops:
        for i, operand in enumerate(op.operands):
            is_handed = prices.fusion.takes(lowered.block, op.op, i)
            yield from moved(operand.name, operand.steps, operand.differentiable, is_handed)
        one = beside.get(op.op.name)
        if one is not None:
            if op.op.name == one.site.products[0].op.name:  # all of its layers at once
                yield one
        elif op.bound is not None:
            yield from _ran(op, lowered, prices)
        for name in op.op.outputs:
            value, is_handed = lowered.tensors[name], key(lowered.block, name) in handed
            yield from moved(name, value.steps, value.tensor.differentiable, is_handed)
    for operand in lowered.outputs:
        yield from moved(operand.name, operand.steps, operand.differentiable, False)


def _in_pieces(lowered: Lowered, prices: Prices) -> dict[str, _Pieces]:
    """By tensor, what the plan runs in pieces."""
    cut = {}
    for site in sites(lowered) if lowered.pieces else ():
        count = lowered.pieces.get(site.key, 1)
        one = site_beside(prices, site, lowered) if count > 1 else None
        if one is not None:
            cut[site.name] = _Pieces(site, one, count, laid(prices, one, count))
    return cut


def _resharded(
    lowered: Lowered,
    prices: Prices,
    name: str,
    steps: tuple[Step, ...],
    grad: bool,
    handed: bool,
) -> _Run:
    tensor = lowered.graph.tensors[name]
    ways = [tuple(collectives(steps, tensor.dtype, prices.mesh, w)) for w in _WAYS]
    what = [f"{_names(each)} of {name}" for each in ways]
    sizes = [sum(c.size_bytes for c in each) for each in ways]
    taken = prices.steps(steps, tensor, grad, handed)
    return _Run((what[0], what[1]), "model axes", taken, (sizes[0], sizes[1]))


def _ran(op: LoweredOp, lowered: Lowered, prices: Prices) -> Iterator[_Run]:
    """An op, then those of its own collectives that its compute leaves bare."""
    tensors, name = lowered.graph.tensors, op.op.name
    compute = prices.compute(op, tensors, lowered.block)
    yield _Run((name, name), "compute", compute)
    pieces = pieces_of(lowered, op)
    inside = [*internal_collectives(op, lowered.mesh, pieces)]
    if inside:
        each = [tuple(i.collective for i in inside if i.direction == way) for way in _WAYS]
        what = [f"{_names(some)} in {name}" for some in each]
        sizes = [sum(c.size_bytes for c in some) for some in each]
        bare = inside_of(prices, lowered, op)
        yield _Run((what[0], what[1]), "model axes", bare, (sizes[0], sizes[1]))


_WAYS: tuple[Way, Way] = ("forward", "backward")


def _moving(
    moved: Sequence[Collective], part: str, start_s: float, end_s: float, count: int
) -> OpSpan:
    size = sum(-(-c.size_bytes // count) for c in moved)
    return OpSpan(f"{_names(moved)}{part}", "model axes", start_s, end_s, size)


def _names(moved: Sequence[Collective]) -> str:
    return ", ".join(dict.fromkeys(f"{one.kind}({one.axis})" for one in moved))


def _module(op: LoweredOp) -> str:
    return op.op.name.rpartition("/")[0]
