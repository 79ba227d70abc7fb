"""Which block calls of a graph are one loop over layers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.graph import Block
from autopar.rules.resharding import Step


@dataclass(frozen=True, slots=True)
class Run:
    """Calls of all layers of a block in order, each reading what the one before gave.

    fixed:   operands that are the same for all of them. carried: those that the call before gave.
    each:    entries of the batch of which every call reads one of its own.
    between: for each carried one, the steps from one call to the next.
    """

    ops: tuple[LoweredOp, ...]
    fixed: tuple[int, ...]
    carried: tuple[int, ...]
    between: tuple[tuple[Step, ...], ...]
    each: tuple[int, ...] = ()

    @property
    def parts(self) -> bool:
        """Whether the last layer stands apart: nothing happens to what it gives."""
        return any(self.between)

    @property
    def again(self) -> tuple[str, ...]:
        """Tensors that such a last layer reads, beside what the loop gives."""
        given = self.ops[-1].operands
        return tuple(given[i].name for i in (*self.fixed, *self.each) if self.parts)


def last_alone(lowered: Lowered) -> frozenset[str]:
    """Blocks whose last layer stands apart from the loop over the others, so that its parameters
    are stored apart, too: cutting them off a stack would copy it."""
    every = [lowered, *lowered.blocks.values()]
    partial_runs = (run for graph in every for run in runs(graph).values() if run.parts)
    return frozenset(str(run.ops[0].op.attrs["block"]) for run in partial_runs)


def last_stack(block: str) -> str:
    """The name under which the last layer of such a block is stored."""
    return f"{block}.last"


def place(block: Block, instance: str) -> int:
    """The row of ``instance`` in the stacked parameters of its block."""
    return list(dict.fromkeys(block.instances)).index(instance)


def runs(lowered: Lowered) -> dict[int, Run]:
    """By the position of their first op, the loops of a graph."""
    run_at: dict[int, Run] = {}
    ops = lowered.ops
    index = 0
    while index < len(ops):
        end = index
        while end < len(ops) and _same_block(ops[index], ops[end]):
            end += 1
        if end > index:
            run = _run(lowered, ops[index:end])
            if run is not None:
                run_at[index] = run
            index = end
        else:
            index += 1
    return run_at


def _same_block(first: LoweredOp, other: LoweredOp) -> bool:
    same = first.op.attrs.get("block") == other.op.attrs.get("block")
    return first.op.kind == other.op.kind == "block" and same


def _run(lowered: Lowered, ops: tuple[LoweredOp, ...]) -> Run | None:
    block = lowered.graph.blocks[ops[0].op.attrs["block"]]
    order = [op.op.attrs["instance"] for op in ops]
    if len(ops) < 2 or order != list(dict.fromkeys(block.instances)):
        return None
    outputs = len(ops[0].op.outputs)
    carried: list[int] = []
    each: list[int] = []
    between: tuple[tuple[Step, ...], ...] = ()
    for number, (before, op) in enumerate(itertools.pairwise(ops)):
        made = {name: i for i, name in enumerate(before.op.outputs)}
        here = [p for p, name in enumerate(op.op.inputs) if name in made]
        if [made[op.op.inputs[p]] for p in here] != list(range(outputs)):
            return None
        same = [p for p in range(len(op.op.inputs)) if p not in here]
        own = [p for p in same if op.op.inputs[p] != before.op.inputs[p]]
        if any(name not in lowered.graph.inputs for p in own for name in _both(before, op, p)):
            return None
        if any(op.operands[p].steps for p in same):  # each layer brings its own copy
            return None
        if any(_reads(lowered, name) != 1 for name in before.op.outputs):
            return None
        steps = tuple(
            (*lowered.tensors[op.op.inputs[p]].steps, *op.operands[p].steps) for p in here
        )
        if number and (here, own, steps) != (carried, each, between):
            return None
        carried, each, between = here, own, steps
    others = [p for p in range(len(ops[0].op.inputs)) if p not in carried]
    fixed = [p for p in others if p not in each]
    if any(ops[0].operands[p].steps for p in others):
        return None
    if each and [*fixed, *each, *carried] != list(range(len(ops[0].op.inputs))):
        return None
    return Run(ops, tuple(fixed), tuple(carried), between, tuple(each))


def _both(before: LoweredOp, after: LoweredOp, place: int) -> tuple[str, str]:
    return before.op.inputs[place], after.op.inputs[place]


def _reads(lowered: Lowered, name: str) -> int:
    return sum(o.name == name for op in lowered.ops for o in op.operands) + sum(
        o.name == name for o in lowered.outputs
    )
