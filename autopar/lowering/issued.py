"""The collectives on activations that one rank takes part in: between ops, and inside of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.pieces import BEFORE, pieces_of, sites
from autopar.lowering.routed_pieces import pieces_of as routed_pieces
from autopar.nouns.graph import DTYPE_BYTES, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.recompute import FULL, KEEP_ALL, Recompute
from autopar.rules.extents import busiest, extents, factor_names, kept_share
from autopar.rules.narrow import RECIPE, joins, running
from autopar.rules.notation import Internal
from autopar.rules.resharding import SHIFT, Collective, Step, collectives


@dataclass(frozen=True, slots=True)
class Priced:
    """A collective of one step of training: where it is, how often it runs per optimizer step, and
    the dtype of what it moves. ``largest``: what takes the time where ranks have unequal shares."""

    key: str
    direction: str
    collective: Collective
    count: int
    dtype: str
    largest: Collective | None = None


def activation_collectives(
    lowered: Lowered, recompute: Recompute = KEEP_ALL, times: int | None = None
) -> Iterator[Priced]:
    """Every collective on activations that one rank takes part in, forward and backward.

    Those of a block stand there once, counted for all of its calls.

    ``times`` is how often the graph runs in a step; by default once per microbatch. Blocks that
    recompute in full run forward again, see `rerun_collectives`.
    """
    if times is None:
        times = lowered.passes
    called = [op.op.attrs["block"] for op in lowered.ops if op.bound is None]
    each = Counter(zip(called, recompute.by_call(len(called)), strict=True))
    for name, calls in Counter(called).items():
        body = lowered.blocks[name]
        yield from activation_collectives(body, KEEP_ALL, times * calls)
        if each[name, FULL]:
            yield from rerun_collectives(body, times * each[name, FULL])
    pieces = pieces_of(lowered)
    for value in lowered.tensors.values():
        grad = value.tensor.differentiable  # of a tied parameter there can be a shared copy too
        yield from _priced(value.tensor, value.steps, grad, lowered, times, pieces)
    for op in lowered.ops:
        for operand in op.operands:
            tensor = lowered.graph.tensors[operand.name]
            grad = operand.differentiable
            yield from _priced(tensor, operand.steps, grad, lowered, times, pieces)
        if op.bound is not None:
            where = key(lowered.block, op.op.name)
            for inside in internal_collectives(op, lowered.mesh, routed_pieces(lowered, op)):
                yield inside.priced(where, times)
    for operand in lowered.outputs:
        tensor = lowered.graph.tensors[operand.name]
        yield from _priced(tensor, operand.steps, operand.differentiable, lowered, times, {})


def rerun_collectives(body: Lowered, times: int = 1) -> Iterator[Priced]:
    """Forward collectives of a block that is recomputed.

    Recomputation stops at the last op that saves anything: what comes after it is not run again.
    Where that is a layer with its collective in pieces, one call makes both, and saves behind them.
    """
    pieces, last = pieces_of(body), last_kept(body)
    for i, op in enumerate(body.ops[: last + 1]):
        for operand in op.operands:
            tensor = body.graph.tensors[operand.name]
            yield from _priced(tensor, operand.steps, False, body, times, pieces)
        if op.bound is not None:
            for inside in internal_collectives(op, body.mesh, routed_pieces(body, op)):
                if inside.direction == "forward":
                    yield inside.priced(key(body.block, op.op.name), times)
        for name in op.op.outputs if i < last else ():
            tensor, steps = body.graph.tensors[name], body.tensors[name].steps
            yield from _priced(tensor, steps, False, body, times, pieces)
    if last >= 0:
        yield from _called_with(body.ops[last], body, times, pieces)


def _called_with(
    op: LoweredOp, body: Lowered, times: int, pieces: Mapping[str, int]
) -> Iterator[Priced]:
    """Forward collectives of what a layer gives that its own call makes."""
    for site in sites(body) if pieces.keys() & op.op.outputs else ():
        if site.name in op.op.outputs and site.name in pieces and site.kind not in BEFORE:
            tensor = body.graph.tensors[site.name]
            yield from _priced(tensor, (site.step,), False, body, times, pieces)


def last_kept(body: Lowered) -> int:
    """The place of the last op that saves anything for backward; -1: none does."""
    return max((i for i, op in enumerate(body.ops) if _saves(op, body)), default=-1)


def last_moves(body: Lowered) -> frozenset[str]:
    """Ops of a block behind that, before which something moves. It is not moved again where it
    stands behind what is kept last in the program, too."""
    if body.block is None:
        return frozenset()
    behind = body.ops[last_kept(body) + 1 :]
    return frozenset(op.op.name for op in behind if any(o.steps for o in op.operands))


def _saves(op: LoweredOp, body: Lowered) -> bool:
    rule = None if op.bound is None else op.bound.rule
    grad = any(body.graph.tensors[n].differentiable for n in op.op.outputs)
    return grad and (rule is None or bool(rule.saves or rule.saves_results or rule.keeps))


class Inside(NamedTuple):
    """A collective inside an op, which one run of it makes so often.

    most: of its bytes, which are an even share, what the rank has that has most.
    """

    direction: str
    collective: Collective
    times: int
    dtype: str
    most: float = 1.0

    @property
    def largest(self) -> Collective:
        """What takes the time: ranks wait for the one that has most."""
        size = math.ceil(self.collective.size_bytes * self.most)
        return replace(self.collective, size_bytes=size)

    def priced(self, where: str, times: int) -> Priced:
        largest = None if self.most == 1.0 else self.largest
        return Priced(
            where, self.direction, self.collective, times * self.times, self.dtype, largest
        )


def internal_collectives(op: LoweredOp, mesh: Mesh, pieces: int = 1) -> Iterator[Inside]:
    """Those inside the op's own implementations under its strategy, and of scales; ``pieces``: in
    which its tokens travel to experts."""
    assert op.bound is not None
    if RECIPE in op.op.attrs:
        wanted = op.operands[0].differentiable, op.operands[1].differentiable
        layer = running(op.op, op.bound, op.strategy, mesh, wanted)
        for direction, moved in joins(*layer) if layer else ():
            yield Inside(direction, moved, 1, "float32")
    local = extents(op.bound, op.strategy, mesh)
    for each in op.bound.rule.implementations:
        axes = [a for a, c in op.strategy.choices if c == each.choice and mesh.size(a) > 1]
        moves = [inside for inside in each.moves if _is_made(inside, op)]
        for inside, (i, axis) in product(moves, enumerate(axes)):
            names = factor_names(op.bound, inside.dims)
            chunked = op.bound.rule.chunked
            if chunked is not None and chunked.factor in names:
                others = math.prod(local[n] for n in names if n != chunked.factor) * inside.count
                for rows, times in chunked.sizes(local[chunked.factor]):
                    size = rows * others * DTYPE_BYTES[inside.dtype]
                    moved = Collective(inside.kind, axis, size)
                    yield Inside(inside.direction, moved, times, inside.dtype)
                continue
            numel = math.prod(local[name] for name in names) * inside.count
            if inside.ahead:  # of all pieces at once
                numel *= mesh.ways(axes[: i + 1]) * pieces
            else:
                share = kept_share(op.bound.rule, op.strategy, mesh)
                numel = math.ceil(numel // pieces * share)
            size = numel * DTYPE_BYTES[inside.dtype]
            times = 1 if inside.ahead else pieces
            if inside.kind == SHIFT:
                rounds = _rounds(inside, local[each.factor], [mesh.size(a) for a in axes])
                times *= (rounds[i] - 1) * math.prod(rounds[:i])
            moved = Collective(inside.kind, axis, size)
            most = 1.0 if inside.ahead else busiest(op.bound, op.strategy, mesh)
            yield Inside(inside.direction, moved, times, inside.dtype, most)


def _is_made(inside: Internal, op: LoweredOp) -> bool:
    """Whether it runs: those of backward do where a gradient is asked for that needs them."""
    asking = [operand.differentiable for operand in op.operands]
    if inside.direction == "forward":
        return True
    return any(asking) if inside.needed_by is None else asking[inside.needed_by]


def _rounds(shift: Internal, rows: int, ways: Sequence[int]) -> list[int]:
    """Pieces, of so many ``rows``, that a rank has along each axis of a ring, outermost first: an
    inner ring goes all the way round for each step along the one before. Of what begins ``back``
    before a rank's own piece the outermost brings no more than that."""
    rounds = [*ways]
    if shift.back is not None:
        behind = -(-shift.back // (rows * math.prod(ways[1:])))
        rounds[0] = min(rounds[0], 1 + behind)
    return rounds


def _priced(
    tensor: Tensor,
    steps: tuple[Step, ...],
    differentiable: bool,
    lowered: Lowered,
    times: int,
    pieces: Mapping[str, int],
) -> Iterator[Priced]:
    """``pieces``: by tensor, of which each collective is so many smaller ones."""
    where, count = key(lowered.block, tensor.name), pieces.get(tensor.name, 1)
    for direction in ("forward", "backward") if differentiable else ("forward",):
        for collective in collectives(steps, tensor.dtype, lowered.mesh, direction):
            each = replace(collective, size_bytes=collective.size_bytes // count)
            yield Priced(where, direction, each, times * count, tensor.dtype)
