"""What a forward may write into: only what it made itself, and the counters of batch normalisation.

A program computes new tensors, so a write into the model, the batch or an operand would be lost.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.frontends.pytorch.calls import NotAlike
from autopar.frontends.pytorch.errors import MutationError
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter, is_inplace

_WRITES = (
    "{}: the forward writes into {}. Only batch normalisation may update its buffers: compute a "
    "new tensor instead"
)
_STATISTICS = frozenset({"batch_norm", "instance_norm", "cudnn_batch_norm", "native_batch_norm"})


def check_writable(lifter: Lifter, node: fx.Node) -> None:
    held = lifter.env.get(node)
    if node in lifter.entered:
        kind = lifter.trace.kinds[lifter.entered[node]]
        raise NotAlike(kind.group, "the layer writes into its input")
    if isinstance(held, Value) and held.role in ("parameter", "buffer"):
        raise MutationError(_WRITES.format(lifter.source, f"{held.role} {held.name!r}"))


def refuse_assignment(lifter: Lifter, node: fx.Node) -> None:
    held = lifter.read(node)
    name = f" {held.name!r}" if isinstance(held, Value) and held.name else ""
    raise MutationError(
        f"{lifter.source}: the forward assigns to .data of a tensor{name}, which no gradient and "
        "no program sees: compute a new tensor instead"
    )


def check_writes(lifter: Lifter, node: fx.Node) -> None:
    """Refuses what writes into an operand by another way than an in-place op of torch."""
    schema = node.target._schema  # type: ignore[union-attr]
    known = (*_STATISTICS, "detach_")
    if not schema.is_mutable or is_inplace(node.target) or node.target._opname in known:  # type: ignore[union-attr]
        return
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    given |= node.kwargs
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not written or given.get(argument.name) is None:
            continue
        operand: Any = given[argument.name]
        if isinstance(operand, fx.Node):
            check_writable(lifter, lifter.root(operand))
        raise MutationError(
            f"{lifter.source}: {node.target} writes into its operand {argument.name!r}: use the "
            "form that returns a new tensor, without out="
        )


def counts_batches(lifter: Lifter, node: fx.Node) -> bool:
    """Batch normalisation's counter: part of what ``updates_buffers`` says."""
    held = lifter.env.get(node.args[0])  # type: ignore[arg-type]
    name = held.name if isinstance(held, Value) else ""
    owner, _, last = name.rpartition(".")
    if last != "num_batches_tracked":
        return False
    if node.users:  # the forward computes with the count
        check_writable(lifter, node.args[0])  # type: ignore[arg-type]
    lifter.counters[owner] = lifter.source
    return True


def check_counters(lifter: Lifter) -> None:
    """Refuses a counter by that name in a module whose statistics no op updates, and one that
    some op reads."""
    read = {value.name for node in lifter.nodes for value in node.inputs}
    updating = {
        value.name.rpartition(".")[0]
        for node in lifter.nodes
        if node.kind == "batch_norm" and node.attrs["updates_buffers"]
        for value in node.inputs
        if value.role == "buffer"
    }
    for owner, source in lifter.counters.items():
        name = f"{owner}.num_batches_tracked".lstrip(".")
        if owner not in updating or name in read:
            raise MutationError(_WRITES.format(source, f"buffer {name!r}"))
