"""Products whose collective may run in pieces of rows beside them: where, and in how many.

A *site* is a tensor with one step over one axis between how it is and how it is wanted, next to
linear layers: those that all of its readers are, or the one that makes it.

=========  ===============  ===========================  ==============================
kind       step             beside                       cut into pieces
=========  ===============  ===========================  ==============================
gathered   ``S -> D``       the layers that read it      each rank's part of the dim
copied     ``R -> D``       the layers that read it      its rows (backward alone moves)
scattered  ``P -> S``       the layer that makes it      each rank's part of the dim
reduced    ``P -> R``       the layer that makes it      its rows (forward alone moves)
=========  ===============  ===========================  ==============================

A plan says of each how many pieces it runs in (`autopar.nouns.plan.Spread.pieces`); programs call
`autopar.runtime.pytorch.pieces`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.lowering.lowered import Lowered, LoweredOp, LoweringError
from autopar.nouns.axes import OPS
from autopar.nouns.graph import Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import key
from autopar.rules.narrow import RECIPE
from autopar.rules.notation import BoundRule
from autopar.rules.resharding import Step

GATHERED, COPIED, SCATTERED, REDUCED = "gathered", "copied", "scattered", "reduced"
KINDS: Mapping[tuple[str, str], str] = {
    ("S", "D"): GATHERED,
    ("R", "D"): COPIED,
    ("P", "S"): SCATTERED,
    ("P", "R"): REDUCED,
}
"""By the kinds of the placements before and behind the step."""
BEFORE = (GATHERED, COPIED)
"""Those whose step stands before the products."""
LEAST_ROWS = 16
"""Of a product in a piece: the rows of one instruction of tensor cores (``m16n8k16``)."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a collective may run in pieces beside products.

    key:      the plan's key of the tensor, ``name`` its name in its graph.
    products: the layers beside, in the order of the graph.
    part:     what pieces must divide: places of a dim on a rank, or rows of one sample.
    rows:     of the products on a rank.
    """

    key: str
    name: str
    kind: str
    step: Step
    products: tuple[LoweredOp, ...]
    part: int
    rows: int

    def takes(self, pieces: int) -> bool:
        """Whether so many pieces are equal, and none of them too thin."""
        return takes(self.part, self.rows, pieces)


def takes(part: int, rows: int, pieces: int) -> bool:
    return pieces == 1 or (part % pieces == 0 and rows // pieces >= LEAST_ROWS)


@dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers of one graph that hold their own weight and nothing else does."""

    makers: Mapping[str, Op]
    readers: Mapping[str, Sequence[tuple[Op, int]]]
    tensors: Mapping[str, Tensor]
    returned: frozenset[str]

    @staticmethod
    def of(ops: Iterable[Op], outputs: Iterable[str], tensors: Mapping[str, Tensor]) -> Layers:
        makers: dict[str, Op] = {}
        readers: dict[str, list[tuple[Op, int]]] = {}
        for op in ops:
            makers.update(dict.fromkeys(op.outputs, op))
            for place, name in enumerate(op.inputs):
                readers.setdefault(name, []).append((op, place))
        return Layers(makers, readers, tensors, frozenset(outputs))

    def reading(self, name: str) -> tuple[Op, ...]:
        """The layers that read a tensor, where all of its readers are some, of one module."""
        uses = self.readers.get(name, ())
        if name in self.returned or not uses:
            return ()
        if not all(place == 0 and self._is_layer(op) for op, place in uses):
            return ()
        parents = {_module(op).rpartition(".")[0] for op, _ in uses}
        return tuple(op for op, _ in uses) if len(parents) == 1 else ()

    def making(self, name: str) -> Op | None:
        """The layer that makes a tensor."""
        op = self.makers.get(name)
        return op if op is not None and self._is_layer(op) and len(op.inputs) == 2 else None

    def beside(self, name: str, kind: str) -> tuple[Op, ...]:
        """The layers beside a step of that kind; none where it is no site."""
        maker = self.making(name)
        return self.reading(name) if kind in BEFORE else (maker,) if maker else ()

    def _is_layer(self, op: Op) -> bool:
        """``x, weight`` and maybe a bias, of a module of their own, in the dtype of compute."""
        held, module = op.inputs[1:], _module(op)
        return (
            op.kind == "linear"
            and RECIPE not in op.attrs
            and bool(module)
            and held[0] == f"{module}.weight"
            and all(self.tensors[n].role == "parameter" for n in held)
            and all(len(self.readers[n]) == 1 and n.rpartition(".")[0] == module for n in held)
            and len(self.tensors[op.inputs[0]].shape) > 1
        )


def kind_of(step: Step) -> str | None:
    """The kind of a site with this step; None where it is none."""
    return KINDS.get((step.source.kind, step.target.kind)) if step.axis in OPS else None


def _module(op: Op) -> str:
    return op.name.rpartition("/")[0]


def sites(lowered: Lowered) -> Iterator[Site]:
    """Those of a graph, without those of its blocks, in the order of its tensors."""
    ops = {op.op.name: op for op in lowered.ops}
    outputs = (o.name for o in lowered.outputs)
    layers = Layers.of((op.op for op in lowered.ops), outputs, lowered.graph.tensors)
    for name, value in lowered.tensors.items():
        uses = layers.readers.get(name, ())
        if not value.tensor.differentiable or not uses:
            continue
        steps = value.steps
        own = [ops[op.name].operands[place].steps for op, place in uses]
        if len(uses) == 1 and name not in layers.returned and not steps:
            steps = own[0]
        elif any(own):
            continue
        if len(steps) == 1:
            site = _site(lowered, name, steps[0], layers, ops)
            if site is not None:
                yield site


def _site(
    lowered: Lowered,
    name: str,
    step: Step,
    layers: Layers,
    ops: Mapping[str, LoweredOp],
) -> Site | None:
    kind = kind_of(step)
    if kind is None:
        return None
    products = tuple(ops[op.name] for op in layers.beside(name, kind))
    fits = all(_plain(op, step.axis, kind) for op in products)
    cut = extent(kind, step, lowered.mesh)
    if not products or not fits or cut is None:
        return None
    return Site(key(lowered.block, name), name, kind, step, products, *cut)


def _plain(op: LoweredOp, axis: str, kind: str) -> bool:
    """Whether nothing is done to its weight on the way, and the axis splits what the step is for:
    the layer's outputs, or what it sums over."""
    if op.bound is None or any(operand.steps for operand in op.operands[1:]):
        return False
    return op.strategy.on(axis) in factors_for(kind, op.bound)


def factors_for(kind: str, bound: BoundRule) -> tuple[str, ...]:
    """What the axis of a site's step splits of a layer beside it."""
    outputs, summed = bound.operands[1]
    return outputs if kind in BEFORE else summed


def extent(kind: str, step: Step, mesh: Mesh) -> tuple[int, int] | None:
    """What pieces must divide, and the rows of the products; None where ranks' parts are unequal,
    or of the dim that is summed over."""
    shape, ways = step.local_shape, mesh.size(step.axis)
    rows = math.prod(shape[:-1])
    if kind in (COPIED, REDUCED):
        return math.prod(shape[1:-1]) if len(shape) > 2 else rows, rows
    placed = step.source if kind == GATHERED else step.target
    if placed.dim == len(shape) - 1 or placed.zigzag:
        return None
    if kind == GATHERED:
        return shape[placed.dim], rows * ways
    return None if shape[placed.dim] % ways else (shape[placed.dim] // ways, rows)


def pieces_of(lowered: Lowered) -> dict[str, int]:
    """By tensor, in how many pieces the sites of a graph run, those of its blocks left out."""
    if not lowered.pieces:
        return {}
    counts = ((site.name, lowered.pieces.get(site.key, 1)) for site in sites(lowered))
    return {name: count for name, count in counts if count > 1}


def with_pieces(lowered: Lowered, pieces: Mapping[str, int]) -> Lowered:
    """The same, with as many pieces at the sites that are named by key."""
    blocks = {name: with_pieces(body, pieces) for name, body in lowered.blocks.items()}
    return replace(lowered, pieces=pieces, blocks=blocks)


def check_pieces(lowered: Lowered) -> None:
    """Raises `LoweringError` where a plan has pieces that cannot be: of a tensor that is no site,
    unequal ones, or of a layer on both of its sides."""
    there = {site.key: site for site, _ in every_site(lowered)}
    taken: dict[tuple[str, str], str] = {}
    for where, count in lowered.pieces.items():
        site = there.get(where)
        if site is None:
            may = f"; it may be of {', '.join(sorted(there))}" if there else ""
            raise LoweringError(
                f"{where} in {count} pieces: no collective over tensor-parallel ranks stands there "
                f"alone beside linear layers{may}"
            )
        if not site.takes(count):
            fits = ", ".join(str(n) for n in COUNTS if site.takes(n))
            raise LoweringError(
                f"{where} in {count} pieces of {site.part}, {site.rows} rows in all: they must be "
                f"equal, of {LEAST_ROWS} rows at least: {fits}"
            )
        for op in site.products if count > 1 else ():
            other = taken.setdefault((where.rpartition("::")[0], op.op.name), where)
            if other != where:
                raise LoweringError(
                    f"{op.op.name} lies between {other} and {where}: one of them may be in pieces"
                )


def every_site(lowered: Lowered) -> Iterator[tuple[Site, Lowered]]:
    """Those of a graph and of its blocks, each with the graph that it is of."""
    for part in (lowered, *lowered.blocks.values()):
        for site in sites(part):
            yield site, part
