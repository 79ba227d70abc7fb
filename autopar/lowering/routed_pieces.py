"""Tokens of experts that travel in pieces: which ops may, and in how many.

An op whose routes go to their experts along one axis and come back (`DISPATCH`) may cut a rank's
tokens into equal pieces: while rows of one travel, those of another are computed with
(`autopar.runtime.pytorch.experts`). Where rows hop along several axes only the first hop could be
hidden, and tokens travel at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.lowering.lowered import Lowered, LoweredOp, LoweringError
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.mesh import Mesh
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import key
from autopar.rules.extents import extents
from autopar.rules.implementations.table import DISPATCH
from autopar.rules.strategies import Strategy

TOKENS, ROUTES = "n", "k"
"""Factors of an op's rule."""
LEAST_TOKENS = 16
"""Of a piece on a rank, so that rows are products of some size: those of one instruction of tensor
cores, were they all one expert's."""


def axis_of(op: LoweredOp, mesh: Mesh) -> str | None:
    """The axis along which the routes of an op travel; None where it has none, or several."""
    axes = [a for a in op.implementations.get(DISPATCH, ()) if mesh.size(a) > 1]
    return axes[0] if len(axes) == 1 else None


def tokens_of(op: LoweredOp, mesh: Mesh) -> int:
    """That a rank has in a microbatch."""
    assert op.bound is not None
    return extents(op.bound, op.strategy, mesh)[TOKENS]


def takes(op: LoweredOp, mesh: Mesh, pieces: int) -> bool:
    """Whether its tokens may travel in so many pieces: equal ones, none of them too thin."""
    if pieces == 1:
        return True
    if axis_of(op, mesh) is None:
        return False
    tokens = tokens_of(op, mesh)
    return tokens % pieces == 0 and tokens // pieces >= LEAST_TOKENS


def of_a_piece(op: LoweredOp, mesh: Mesh, pieces: int) -> tuple[LoweredOp, Mesh]:
    """An op on one of ``pieces`` equal pieces of a rank's tokens: on a mesh with as many times its
    microbatches."""
    count = mesh.size(MICROBATCH) * pieces
    others = [(a, mesh.size(a)) for a in mesh.axes if a != MICROBATCH]
    smaller = Mesh((MICROBATCH, *(a for a, _ in others)), (count, *(n for _, n in others)))
    choices = dict(op.strategy.choices)
    strategy = Strategy(tuple({MICROBATCH: TOKENS, **choices}.items()))
    return replace(op, strategy=strategy), smaller


def sites(lowered: Lowered) -> Iterator[tuple[str, LoweredOp, Lowered]]:
    """The ops of a graph and of its blocks whose tokens may travel in pieces, each with its key and
    the graph that it is of."""
    for part in (lowered, *lowered.blocks.values()):
        for op in part.ops:
            if op.bound is not None and axis_of(op, part.mesh) is not None:
                yield key(part.block, op.op.name), op, part


def pieces_of(lowered: Lowered, op: LoweredOp) -> int:
    """In which the plan has its tokens travel."""
    return lowered.expert_pieces.get(key(lowered.block, op.op.name), 1)


def with_expert_pieces(lowered: Lowered, pieces: Mapping[str, int]) -> Lowered:
    """The same, with as many pieces at the ops that are named by key."""
    blocks = {name: with_expert_pieces(body, pieces) for name, body in lowered.blocks.items()}
    return replace(lowered, expert_pieces=pieces, blocks=blocks)


def check_expert_pieces(lowered: Lowered) -> None:
    """Raises `LoweringError` where a plan has pieces that cannot be."""
    there = {where: (op, part.mesh) for where, op, part in sites(lowered)}
    for where, count in lowered.expert_pieces.items():
        if where not in there:
            may = f"; it may be of {', '.join(sorted(there))}" if there else ""
            raise LoweringError(
                f"{where} in {count} pieces of its tokens: they do not travel to experts along one "
                f"axis there{may}"
            )
        op, mesh = there[where]
        if not takes(op, mesh, count):
            fits = ", ".join(str(n) for n in COUNTS if takes(op, mesh, n))
            raise LoweringError(
                f"{where} in {count} pieces of {tokens_of(op, mesh)} tokens: they must be equal, "
                f"of {LEAST_TOKENS} tokens at least: {fits}"
            )
