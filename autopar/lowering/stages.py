"""The parts of a lowered graph that the stages of a plan run, and what travels between them.

A stage runs the ops of the top level from its first to the next stage's first. What it reads of an
earlier stage travels to it directly, as the shared copy that readers start from, and its gradient
back as that copy's. Values that follow from the batch and from constants alone (positions, masks,
angles) are not sent: every stage that reads them makes them again. A parameter that several stages
read is a tie: each holds it, and their gradients add up. What no op reads, such as a picture tower
of a model that is trained on words, is state of the model all the same: the first stage holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.lowering.lowered import Lowered, LoweredOp, LoweredTensor, Operand
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Block, Graph, Op
from autopar.nouns.kinds import DRAWS
from autopar.nouns.plan import Stage


class CutError(UserError, ValueError):
    """Stages that the graph cannot be cut into."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """What one stage runs.

    lowered: its ops alone; its inputs are batch entries and ``takes``, its outputs ``gives``.
    takes:   values of earlier stages, in the order in which they are made.
    gives:   values that later stages read, and the loss where it is made here.
    """

    lowered: Lowered
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """A lowered graph with what every cut of it asks for.

    by_result: the op that makes each value.
    remade:    see `remade`.
    idle:      parameters and buffers of the top level that no op of it reads.
    """

    lowered: Lowered
    by_result: Mapping[str, LoweredOp]
    remade: frozenset[str]
    idle: frozenset[str]

    @staticmethod
    def of(lowered: Lowered) -> Whole:
        by_result = {name: op for op in lowered.ops for name in op.op.outputs}
        return Whole(lowered, by_result, frozenset(remade(lowered)), _unread(lowered))


def stage_parts(lowered: Lowered, stages: Sequence[Stage]) -> tuple[StagePart, ...]:
    """The parts of ``stages``, which share the spread that ``lowered`` is of.

    Raises:
        CutError: a first op that the top level does not have, or that is out of order.
    """
    return parts_of(Whole.of(lowered), stages, range(len(stages)))


def parts_of(
    whole: Whole, stages: Sequence[Stage], wanted: Collection[int]
) -> tuple[StagePart, ...]:
    """As `stage_parts`, of those of the stages that are ``wanted``."""
    lowered = whole.lowered
    runs = op_runs(lowered.ops, stages)
    maker = {name: i for i, run in enumerate(runs) for op in run for name in op.op.outputs}
    final = set(lowered.graph.outputs)
    needed = [_needed(run, whole.remade, final) for run in runs]
    own = [(*_again(run, whole, maker, i), *run) for i, run in enumerate(needed)]
    takes = [_in_order(lowered, {n for n in _read(ops) if n in maker} - _made(ops)) for ops in own]
    parts = []
    for i, ops in enumerate(own):
        if i not in wanted:
            continue
        sent = {name for later in takes[i + 1 :] for name in later}
        gives = _in_order(lowered, {n for op in runs[i] for n in op.op.outputs} & (sent | final))
        held = _part(lowered, ops, takes[i], gives, sent, frozenset() if i else whole.idle)
        parts.append(StagePart(held, takes[i], gives))
    return tuple(parts)


def op_runs(ops: Sequence[LoweredOp], stages: Sequence[Stage]) -> list[tuple[LoweredOp, ...]]:
    """The ops of every stage, in order. Raises `CutError`."""
    place = {op.op.name: i for i, op in enumerate(ops)}
    starts = [0]
    for number, stage in enumerate(stages[1:], 1):
        start = place.get(stage.first, -1)
        if start <= starts[-1]:
            before = stages[number - 1].first or "the first op"
            raise CutError(
                f"stage {number} starts at {stage.first!r}, which is "
                + ("no op of the top level" if start < 0 else f"not behind {before!r}")
                + ": plan the model again"
            )
        starts.append(start)
    return [tuple(ops[a:b]) for a, b in zip(starts, [*starts[1:], len(ops)], strict=True)]


def _read(ops: Sequence[LoweredOp]) -> set[str]:
    return {operand.name for op in ops for operand in op.operands}


def _unread(lowered: Lowered) -> frozenset[str]:
    """Parameters and buffers of the top level that no op of it reads."""
    read = _read(lowered.ops)
    kept = (n for n, v in lowered.tensors.items() if v.tensor.role in ("parameter", "buffer"))
    return frozenset(name for name in kept if name not in read)


def _made(ops: Sequence[LoweredOp]) -> set[str]:
    return {name for op in ops for name in op.op.outputs}


def _in_order(lowered: Lowered, names: set[str]) -> tuple[str, ...]:
    return tuple(n for op in lowered.ops for n in op.op.outputs if n in names)


def updated_buffers(ops: Iterable[Op]) -> set[str]:
    """Buffers that a step leaves otherwise than it found them: one stage has each."""
    updated: set[str] = set()
    for op in ops:
        if op.kind == "carry":
            updated.add(op.inputs[0])
        elif op.attrs.get("updates_buffers"):
            updated.update(op.inputs[-2:])
    return updated


def remade(lowered: Lowered) -> set[str]:
    """Values that follow from the batch and constants alone, and are the same when made twice."""
    tensors = lowered.graph.tensors
    updated = updated_buffers(op.op for op in lowered.ops)
    recomputed: set[str] = set()
    for op in lowered.ops:
        if op.op.kind == "carry" or not updated.isdisjoint(op.op.inputs):
            continue  # the stage that has the buffer
        free = all(not tensors[n].differentiable for n in (*op.op.inputs, *op.op.outputs))
        known = all(tensors[n].role in ("input", "buffer") or n in recomputed for n in op.op.inputs)
        if free and known and op.op.kind != "block" and op.op.kind not in DRAWS:
            recomputed.update(op.op.outputs)
    return recomputed


def _needed(
    run: Sequence[LoweredOp], remade: frozenset[str], final: set[str]
) -> tuple[LoweredOp, ...]:
    """``run`` without what later stages alone read and make for themselves."""
    kept: list[LoweredOp] = []
    read = set(final)
    for op in reversed(run):
        if read.intersection(op.op.outputs) or not remade.issuperset(op.op.outputs):
            kept.append(op)
            read.update(op.op.inputs)
    return tuple(reversed(kept))


def _again(
    run: Sequence[LoweredOp], whole: Whole, maker: Mapping[str, int], stage: int
) -> tuple[LoweredOp, ...]:
    """Ops of earlier stages that this one runs too, in the order of the graph."""
    wanted: dict[str, None] = {}
    waiting = [*_read(run)]
    while waiting:
        name = waiting.pop()
        if name in whole.remade and maker[name] < stage and name not in wanted:
            wanted |= dict.fromkeys(whole.by_result[name].op.outputs)
            waiting += whole.by_result[name].op.inputs
    if not wanted:
        return ()
    every = whole.by_result.items()
    return tuple(op for name, op in every if name in wanted and op.op.name == name)


def _part(
    lowered: Lowered,
    ops: Sequence[LoweredOp],
    takes: Sequence[str],
    gives: Sequence[str],
    sent: Collection[str],
    idle: frozenset[str],
) -> Lowered:
    """``lowered`` with these ops alone; ``sent``: what later stages take; ``idle``: what it holds
    and no op reads."""
    graph = lowered.graph
    read, made = _read(ops), _made(ops)
    inputs = tuple(n for n in graph.inputs if n in read) + tuple(takes)
    tensors: dict[str, LoweredTensor] = {}
    for name, value in lowered.tensors.items():
        if name in takes:
            tensor = replace(value.tensor, role="input")
            tensors[name] = LoweredTensor(tensor, value.shared, value.shared, ())
        elif name in made or name in read or name in idle:
            tensors[name] = value
    outputs = []
    for name in gives:
        final = next((o for o in lowered.outputs if o.name == name), None)
        value = lowered.tensors[name]
        if final is not None and name in sent and final.wanted != value.shared:
            raise CutError(
                f"the model returns {name!r} as {final.wanted}, and a later stage reads it as "
                f"{value.shared}: a stage gives it once; cut elsewhere, or leave pp out"
            )
        outputs.append(final or Operand(name, value.shared, (), value.tensor.differentiable))
    blocks: dict[str, Block] = {}
    for name, block in graph.blocks.items():
        called = [
            op.op.attrs["instance"]
            for op in ops
            if op.op.kind == "block" and op.op.attrs["block"] == name
        ]
        if called:
            blocks[name] = replace(block, instances=tuple(called), apart=bool(block.units))
    part = Graph(
        {name: value.tensor for name, value in tensors.items()},
        tuple(op.op for op in ops),
        inputs,
        tuple(gives),
        blocks,
    )
    return replace(
        lowered,
        graph=part,
        tensors=tensors,
        ops=tuple(ops),
        outputs=tuple(outputs),
        blocks={name: lowered.blocks[name] for name in blocks},
    )
