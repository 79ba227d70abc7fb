"""What the loss of a program divides by, read off its plan: what a batch of another size changes.

A rank computes a share of the loss, and shares add up. A mean over labelled tokens divides by a
count that every step takes anew. Any other mean divides by a number that stands in the program, the
size of the batch that was planned, and a smaller batch has to make up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autopar.files import plan_folder
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.of_plan import batch_dims, lowered_plan, planned_graph
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph
from autopar.nouns.kinds import CROSS_ENTROPIES
from autopar.rules.batch import BatchFlow, batch_flow, flow_or_obstacle

Kind = Literal["counts", "mean", "sum"]


class UnevenBatch(UserError):
    """A batch of a size that was not planned, and a model that takes no other."""


@dataclass(frozen=True, slots=True)
class LossShare:
    """``kind``: of what the loss is; ``written``: a mean's divisor stands in the program.

    trains: why a training step of another size would not be that of one device; "": it is.
    """

    kind: Kind
    written: bool
    trains: str = ""

    def weight(self, rows: int, samples: int, planned: int) -> float:
        """What the share of ``rows`` samples is multiplied with, in a batch of ``samples`` under a
        program for ``planned`` of them."""
        if rows == 0:
            return 0.0
        if self.kind != "mean":
            return 1.0
        return planned / samples if self.written else rows / samples


def loss_share(folder: str | Path) -> LossShare:
    """Of the plan in ``folder``. Raises `UnevenBatch` with the reason where a batch of another size
    has no known loss."""
    plan = plan_folder.read_plan(folder)
    dims = batch_dims(plan_folder.read_batch(folder))
    graph = planned_graph(plan, plan_folder.read_graph(folder))
    flow, obstacle = flow_or_obstacle(graph, dims)
    mixed = obstacle or next(iter(batch_flow(_evaluated(graph), dims).obstacles), None)
    if mixed is not None:
        raise _uneven(f"the model does not treat its samples apart: {mixed}")
    lowered = lowered_plan(plan, graph, dims)
    reducing = _reducing(lowered, flow)
    kinds = {_kind(op) for op in reducing}
    if len(kinds) > 1:
        raise _uneven(f"the loss adds up parts that divide otherwise ({', '.join(sorted(kinds))})")
    written = {_written(lowered, op) for op in reducing}
    if len(written) > 1:
        raise _uneven("the loss adds up means that the program takes in different ways")
    return LossShare(kinds.pop(), written.pop(), next(iter(flow.obstacles), ""))


def _evaluated(graph: Graph) -> Graph:
    """The graph whose batch norms take their running statistics, as in evaluation."""
    ops = tuple(
        replace(op, attrs={**op.attrs, "training": False}) if op.kind == "batch_norm" else op
        for op in graph.ops
    )
    blocks = {n: replace(b, body=_evaluated(b.body)) for n, b in graph.blocks.items()}
    return replace(graph, ops=ops, blocks=blocks)


def _reducing(lowered: Lowered, flow: BatchFlow) -> list[LoweredOp]:
    """The ops that make sums over the batch of values with a batch dim, back from the loss."""
    states = flow.tensors
    makers = {name: op for op in lowered.ops for name in op.op.outputs}
    todo, reducing, seen = [out.name for out in lowered.outputs], [], set()
    scaled = False
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        made = makers.get(name)
        if states.get(name) != "P" or made is None or made.op.kind == "block":
            raise _uneven(f"{name} in the loss is no sum over samples")
        inside = [states.get(x, "") for x in made.op.inputs]
        if any(state.startswith("S") for state in inside):
            reducing.append(made)
            continue
        if "other" in made.op.attrs and made.op.kind in ("add", "sub"):
            raise _uneven(f"{name} adds a number to the loss")
        once = _added_once(made, inside, flow.choices[made.op.name])
        if once:
            raise _uneven(f"{name} adds {once} once to a sum over the batch")
        scaled |= "other" in made.op.attrs or made.op.kind in ("mul", "div")
        todo += [x for x, state in zip(made.op.inputs, inside, strict=True) if state == "P"]
    if scaled and any(_kind(op) == "sum" for op in reducing):
        raise _uneven("the loss is a sum times a number, which may stand for the batch's size")
    return reducing


def _added_once(made: LoweredOp, states: Sequence[str], choice: str) -> str:
    """An operand that stands in the place of a sum and is none: no weight of a share fits both."""
    assert made.bound is not None
    takes = [made.bound.rule.takes_partial(choice, i) for i in range(len(states))]
    return next(
        (x for x, s, t in zip(made.op.inputs, states, takes, strict=True) if t and s != "P"), ""
    )


def _kind(lowered: LoweredOp) -> Kind:
    op = lowered.op
    if op.kind in CROSS_ENTROPIES:
        return "counts" if op.attrs.get("reduction", "mean") == "mean" else "sum"
    return "mean" if op.kind == "mean" else "sum"


def _written(lowered: Lowered, made: LoweredOp) -> bool:
    """Whether the divisor of a mean stands in the program: where something splits what it is taken
    over, as `autopar.emit.pytorch.reductions` prints it."""
    if _kind(made) != "mean":
        return False
    rank = len(lowered.graph.tensors[made.op.inputs[0]].shape)
    dims = made.op.attrs.get("dims", made.op.attrs.get("dim"))
    if isinstance(dims, int):
        dims = (dims,)
    wanted = made.operands[0].wanted
    return any(wanted.split_axes(d % rank) for d in (dims or range(rank)))


def _uneven(reason: str) -> UnevenBatch:
    return UnevenBatch(
        f"a batch of another size than was planned has no loss that could be told: {reason}. Give "
        "batches of the planned size (drop_last=True), or plan for this one"
    )
