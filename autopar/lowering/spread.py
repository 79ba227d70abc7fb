"""From decisions to consequences: every sharding and every collective of a spread.

`lower` turns a graph and a spread of a plan into a `Lowered`: for each op the shardings it reads
and gives, and for each tensor the steps on the way from its producer to its readers. Price, memory
and the emitted program are all read off this one structure, so what runs is what was priced.

A tensor with several readers has one *shared* copy; a reader that wants another sharding makes it
from that copy. The global batch is cut into microbatches first, so ``microbatch`` is the outermost
axis here: local shapes are those of one microbatch on one rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from autopar.nouns.axes import BATCH, MICROBATCH, SAMPLES, SEQUENCES
from autopar.nouns.graph import DTYPE_BYTES, Graph, Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, key
from autopar.nouns.recompute import FULL, KEEP_ALL, Recompute
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, Sharding, split
from autopar.rules.cut import BatchCut
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.resharding import SHIFT, Collective, Step, collectives, reshard
from autopar.rules.strategies import DEFER, NOTHING, PASS_PARTIAL, Strategy, flows, shardings
from autopar.rules.work import extents, factor_names, kept_share

BATCH_AXES = (MICROBATCH, *BATCH)
"""What they do to an op follows from how the batch flows through the graph."""
SAMPLE_AXES = (MICROBATCH, *SAMPLES)


class LoweringError(ValueError):
    """A spread whose decisions do not fit its graph."""


@dataclass(frozen=True, slots=True)
class LoweredTensor:
    """``produced`` by its op, then brought by ``steps`` to ``shared``, which readers start from."""

    tensor: Tensor
    produced: Sharding
    shared: Sharding
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of an op: the shared copy of ``name``, after ``steps``.

    ``differentiable``: the loss's gradient flows back along this edge.
    """

    name: str
    wanted: Sharding
    steps: tuple[Step, ...]
    differentiable: bool


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """``bound`` is None for block calls."""

    op: Op
    bound: BoundRule | None
    strategy: Strategy
    operands: tuple[Operand, ...]
    results: tuple[Sharding, ...]

    @property
    def implementations(self) -> Mapping[str, tuple[str, ...]]:
        """By name what it runs by in place of its plain call, and the axes that ask for it."""
        return {} if self.bound is None else self.strategy.implementations(self.bound.rule)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph on a mesh (``mesh`` has ``microbatch`` in front). ``blocks`` are lowered bodies."""

    graph: Graph
    mesh: Mesh
    block: str | None
    tensors: Mapping[str, LoweredTensor]
    ops: tuple[LoweredOp, ...]
    outputs: tuple[Operand, ...]
    blocks: Mapping[str, Lowered]
    apart: frozenset[str] = frozenset()
    """Tensors of which ranks have many short runs of a dim: their pieces in order are not it."""
    zigzag: Mapping[str, int] | None = None
    """Where pieces along sequences lie in zigzag (`autopar.rules.cut`): of tensors the dim that
    does; of those that are not there, any that an axis of sequences splits."""

    @property
    def order(self) -> str:
        """How pieces along sequences lie."""
        return "contiguous" if self.zigzag is None else "zigzag"

    def lies(self, name: str, axis: str, placement: Placement) -> Placement:
        """A placement of tensor ``name``, marked where its pieces lie in zigzag."""
        if self.zigzag is None or axis not in SEQUENCES or placement.kind != "S":
            return placement
        return replace(placement, zigzag=self.zigzag.get(name, placement.dim) == placement.dim)

    def lie(self, name: str, sharding: Sharding) -> Sharding:
        """Likewise on every axis."""
        return Sharding(tuple((a, self.lies(name, a, p)) for a, p in sharding.placements))

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the shared copy of ``name`` on one rank, in one microbatch."""
        value = self.tensors[name]
        return value.shared.local_shape(value.tensor.shape, self.mesh)

    def local_bytes(self, name: str) -> int:
        """Bytes of that."""
        return math.prod(self.local_shape(name)) * DTYPE_BYTES[self.tensors[name].tensor.dtype]


def lower(
    graph: Graph,
    spread: Spread,
    microbatches: int,
    cut: BatchCut,
    block: str | None = None,
    inputs: Mapping[str, Sharding] | None = None,
) -> Lowered:
    """The consequences of ``spread`` for ``graph``, whose batch is cut so."""
    mesh = Mesh((MICROBATCH, *spread.mesh.axes), (microbatches, *spread.mesh.sizes)).trimmed()
    blocks: dict[str, Lowered] = {}
    for name, repeated in graph.blocks.items():
        given = {
            n: Sharding.parse(spread.shared.get(key(name, n), "R")) for n in repeated.body.inputs
        }
        entering = {
            n: _entering(given[n], mesh, repeated.body.tensors[n], cut, key(name, n))
            for n in repeated.body.inputs
        }
        blocks[name] = lower(repeated.body, spread, microbatches, cut, name, entering)
    tensors: dict[str, LoweredTensor] = {}
    readers = graph.consumers()
    for name in graph.outputs:
        readers[name].append((Op("output", (name,), ()), 0))

    def settle(tensor: Tensor, produced: Sharding, usual: Sharding) -> None:
        text = spread.shared.get(key(block, tensor.name))
        shared = produced
        if text is not None and len(readers[tensor.name]) > 1:
            model = Sharding.parse(text)
            shared = Sharding.of(
                (a, usual.on(a) if a in BATCH_AXES else model.on(a)) for a in mesh.axes
            )
        steps = _steps(tensor, produced, shared, mesh, block, tensor.differentiable)
        tensors[tensor.name] = LoweredTensor(tensor, produced, shared, steps)

    for tensor in graph.tensors.values():
        if inputs is not None and tensor.name in inputs:
            tensors[tensor.name] = LoweredTensor(
                tensor, inputs[tensor.name], inputs[tensor.name], ()
            )
        elif tensor.role == "input":
            axes = (a for a in mesh.axes if a in BATCH_AXES)
            dims = ((a, cut.on(a).dims.get(tensor.name)) for a in axes)
            cuts = Sharding.of((a, split(dim)) for a, dim in dims if dim is not None)
            settle(tensor, cuts, cuts)
        elif tensor.role in ("parameter", "buffer"):
            held = Sharding.parse(spread.parameters.get(key(block, tensor.name), "R"))
            batch = DEFERRED if tensor.differentiable else WHOLE
            produced = Sharding.of(
                (a, batch if a in BATCH_AXES and held.on(a) == WHOLE else held.on(a))
                for a in mesh.axes
            )
            settle(tensor, produced, produced)

    lowered: list[LoweredOp] = []
    for op in graph.ops:
        bound: BoundRule | None = None
        strategy = Strategy()
        if op.kind == "block":
            body = blocks[op.attrs["block"]]
            wants = tuple(body.tensors[n].produced for n in body.graph.inputs)
            usual = gives = tuple(o.wanted for o in body.outputs)
            into = tuple(
                body.graph.tensors[inner].differentiable and graph.tensors[outer].differentiable
                for inner, outer in zip(body.graph.inputs, op.inputs, strict=True)
            )
        else:
            bound = bind(op, graph.tensors)
            where = key(block, op.name)
            decided = Strategy.parse(spread.ops.get(where, "whole"))
            strategy = _strategy(decided, where, mesh, cut)
            _check_choices(decided, where, bound)
            into, out = flows(op, graph.tensors)
            wants, gives = shardings(bound, strategy, mesh, into, out)
            usual = gives
            if any(axis in BATCH_AXES for axis, _ in decided.choices):
                # Readers share what the op would give if it did there what it does mostly.
                others = Strategy(tuple(c for c in decided.choices if c[0] not in BATCH_AXES))
                _, usual = shardings(bound, _strategy(others, where, mesh, cut), mesh, into, out)
        operands = tuple(
            Operand(n, w, _steps(graph.tensors[n], tensors[n].shared, w, mesh, block, grad), grad)
            for n, w, grad in zip(op.inputs, wants, into, strict=True)
        )
        for name, produced, shares in zip(op.outputs, gives, usual, strict=True):
            settle(graph.tensors[name], produced, shares)
        lowered.append(LoweredOp(op, bound, strategy, operands, gives))

    outputs: list[Operand] = []
    for name in graph.outputs:
        shared = tensors[name].shared
        wanted = shared
        if block is None:  # the loss, and others of JAX: model axes agree, shares of data ranks
            # add up to it
            wanted = Sharding.of((a, _share(shared.on(a))) for a in mesh.axes if a in BATCH_AXES)
        grad = graph.tensors[name].differentiable and (block is not None or not outputs)
        steps = _steps(graph.tensors[name], shared, wanted, mesh, block, grad)
        outputs.append(Operand(name, wanted, steps, grad))
    apart = frozenset(n for n in graph.tensors if key(block, n) in cut.apart)
    zigzag = None if cut.zigzag is None else _own_names(cut.zigzag, graph, block)
    moved = [(name, value.steps) for name, value in tensors.items()]
    moved += [(o.name, o.steps) for op in lowered for o in op.operands]
    for name, steps in moved:
        if name in apart:
            _check_in_place(tensors[name], steps, block)
    return Lowered(
        graph, mesh, block, tensors, tuple(lowered), tuple(outputs), blocks, apart, zigzag
    )


def stored(produced: Sharding) -> Sharding:
    """What a plan and a program say of how a parameter is stored: that batch axes which do not
    split it leave it whole goes without saying."""
    placed = produced.placements
    return Sharding(tuple((a, p) for a, p in placed if a not in BATCH_AXES or p.kind == "S"))


def _own_names(at: Mapping[str, int], graph: Graph, block: str | None) -> Mapping[str, int]:
    return {n: at[where] for n in graph.tensors if (where := key(block, n)) in at}


def _check_in_place(value: LoweredTensor, steps: tuple[Step, ...], block: str | None) -> None:
    """Raises `LoweringError` where pieces that lie here and there would be cut or joined again."""
    dims = {p.dim for a, p in value.produced.placements if a in SEQUENCES and p.kind == "S"}
    for step in steps:
        if any(p.kind == "S" and p.dim in dims for p in (step.source, step.target)):
            raise LoweringError(
                f"{key(block, value.tensor.name)} {list(value.tensor.shape)} has samples and "
                f"tokens in one dim, of which ranks along {step.axis} need other samples: keep "
                "these in dims of their own up to there"
            )


def _share(loss: Placement) -> Placement:
    """A loss that every data rank has whole is the first one's share; its gradient stays one."""
    return PARTIAL if loss == WHOLE else loss


def _strategy(decided: Strategy, where: str, mesh: Mesh, cut: BatchCut) -> Strategy:
    """What a plan says of an op; axes of the batch of which it says nothing follow the batch."""
    usual = ((a, cut.on(a).choices[where] if a in BATCH_AXES else "") for a in mesh.axes)
    choices = ((a, decided.on(a) or choice) for a, choice in usual)
    return Strategy(tuple((axis, choice) for axis, choice in choices if choice))


def _check_choices(decided: Strategy, where: str, bound: BoundRule) -> None:
    """Raises `LoweringError` where a plan says of an op what its rule does not have."""
    for axis, choice in decided.choices:
        if choice not in (NOTHING, DEFER, PASS_PARTIAL) and not bound.splits(choice):
            named = {e.choice for e in bound.rule.implementations} - bound.factors.keys()
            raise LoweringError(
                f"{where}: {axis}:{choice} is nothing that an axis may do to it: choose one of "
                f"{', '.join([*bound.factors, *sorted(named)])}"
            )


def _entering(given: Sharding, mesh: Mesh, tensor: Tensor, cut: BatchCut, where: str) -> Sharding:
    """How a block input enters: ``given`` on the axes that split ops."""
    return Sharding.of(
        (a, entering_on(a, tensor, cut, where) if a in BATCH_AXES else given.on(a))
        for a in mesh.axes
    )


def entering_on(axis: str, tensor: Tensor, cut: BatchCut, where: str) -> Placement:
    """How a block input enters on an axis that splits the batch. ``where``: its key."""
    choice = cut.on(axis).choices.get(where, "")
    batch = Placement.parse(choice) if choice else WHOLE
    return WHOLE if batch == DEFERRED and not tensor.differentiable else batch


def _steps(
    tensor: Tensor,
    source: Sharding,
    target: Sharding,
    mesh: Mesh,
    block: str | None,
    differentiable: bool,
) -> tuple[Step, ...]:
    steps = reshard(source, target, tensor.shape, mesh, differentiable)
    if steps is None:
        raise LoweringError(
            f"{key(block, tensor.name)} {list(tensor.shape)} cannot go "
            f"from [{source}] to [{target}]"
        )
    return steps


@dataclass(frozen=True, slots=True)
class Priced:
    """A collective of one step of training: where it is, how often it runs per optimizer step, and
    the dtype of what it moves."""

    key: str
    direction: str
    collective: Collective
    count: int
    dtype: str


def activation_collectives(
    lowered: Lowered, recompute: Recompute = KEEP_ALL, times: int | None = None
) -> Iterator[Priced]:
    """Every collective on activations that one rank takes part in, forward and backward.

    Those of a block stand there once, counted for all of its calls.

    ``times`` is how often the graph runs in a step; by default once per microbatch. Blocks that
    recompute in full run forward again, see `rerun_collectives`.
    """
    if times is None:
        times = lowered.mesh.size(MICROBATCH)
    called = [op.op.attrs["block"] for op in lowered.ops if op.bound is None]
    each = Counter(zip(called, recompute.by_call(len(called)), strict=True))
    for name, calls in Counter(called).items():
        body = lowered.blocks[name]
        yield from activation_collectives(body, KEEP_ALL, times * calls)
        if each[name, FULL]:
            yield from rerun_collectives(body, times * each[name, FULL])
    for value in lowered.tensors.values():
        grad = value.tensor.differentiable  # of a tied parameter there can be a shared copy too
        yield from _priced(value.tensor, value.steps, grad, lowered, times)
    for op in lowered.ops:
        for operand in op.operands:
            tensor = lowered.graph.tensors[operand.name]
            yield from _priced(tensor, operand.steps, operand.differentiable, lowered, times)
        if op.bound is not None:
            where = key(lowered.block, op.op.name)
            for inside in internal_collectives(op, lowered.mesh):
                yield inside.priced(where, times)
    for operand in lowered.outputs:
        tensor = lowered.graph.tensors[operand.name]
        yield from _priced(tensor, operand.steps, operand.differentiable, lowered, times)


def rerun_collectives(body: Lowered, times: int = 1) -> Iterator[Priced]:
    """Forward collectives of a block that is recomputed.

    Recomputation stops at the last op that saves anything: what comes after it is not run again.
    """
    savers = [i for i, op in enumerate(body.ops) if _saves(op, body)]
    for i, op in enumerate(body.ops[: max(savers, default=-1) + 1]):
        for operand in op.operands:
            yield from _priced(body.graph.tensors[operand.name], operand.steps, False, body, times)
        if op.bound is not None:
            for inside in internal_collectives(op, body.mesh):
                if inside.direction == "forward":
                    yield inside.priced(key(body.block, op.op.name), times)
        for name in op.op.outputs if i < max(savers) else ():
            yield from _priced(
                body.graph.tensors[name], body.tensors[name].steps, False, body, times
            )


def _saves(op: LoweredOp, body: Lowered) -> bool:
    rule = None if op.bound is None else op.bound.rule
    grad = any(body.graph.tensors[n].differentiable for n in op.op.outputs)
    return grad and (rule is None or bool(rule.saves or rule.saves_results or rule.keeps))


class Inside(NamedTuple):
    """A collective inside an op, which one run of it makes so often."""

    direction: str
    collective: Collective
    times: int
    dtype: str

    def priced(self, where: str, times: int) -> Priced:
        return Priced(where, self.direction, self.collective, times * self.times, self.dtype)


def internal_collectives(op: LoweredOp, mesh: Mesh) -> Iterator[Inside]:
    """Those inside the op's own implementations under its strategy."""
    assert op.bound is not None
    local = extents(op.bound, op.strategy, mesh)
    for each in op.bound.rule.implementations:
        axes = [a for a, c in op.strategy.choices if c == each.choice and mesh.size(a) > 1]
        for inside, (i, axis) in product(each.moves, enumerate(axes)):
            names = factor_names(op.bound, inside.dims)
            numel = math.prod(local[name] for name in names) * inside.count
            if inside.ahead:
                numel *= mesh.ways(axes[: i + 1])
            else:
                numel = math.ceil(numel * kept_share(op.bound.rule, op.strategy, mesh))
            size = numel * DTYPE_BYTES[inside.dtype]
            times = mesh.size(axis) - 1 if inside.kind == SHIFT else 1
            moved = Collective(inside.kind, axis, size)
            yield Inside(inside.direction, moved, times, inside.dtype)


def _priced(
    tensor: Tensor, steps: tuple[Step, ...], differentiable: bool, lowered: Lowered, times: int
) -> Iterator[Priced]:
    where = key(lowered.block, tensor.name)
    for direction in ("forward", "backward") if differentiable else ("forward",):
        for collective in collectives(steps, tensor.dtype, lowered.mesh, direction):
            yield Priced(where, direction, collective, times, tensor.dtype)


__all__ = [
    "BATCH_AXES",
    "MICROBATCH",
    "SAMPLE_AXES",
    "Lowered",
    "LoweredOp",
    "LoweredTensor",
    "LoweringError",
    "Operand",
    "Priced",
    "activation_collectives",
    "entering_on",
    "internal_collectives",
    "lower",
    "stored",
]
