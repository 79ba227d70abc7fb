"""What a forward may write into: what it made itself, and buffers of the model (`carried`).

A program computes new tensors, so a write into a parameter, the batch or an operand would be lost.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.frontends.pytorch.calls import NotAlike
from autopar.frontends.pytorch.errors import MutationError
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter, is_inplace
from autopar.torch_private.ops import op_name, schema_of

_STATISTICS = frozenset({"batch_norm", "instance_norm", "cudnn_batch_norm", "native_batch_norm"})


def check_writable(lifter: Lifter, node: fx.Node) -> None:
    held = lifter.env.get(node)
    if node in lifter.entered:
        kind = lifter.trace.kinds[lifter.entered[node]]
        raise NotAlike(kind.group, "the layer writes into its input")
    if isinstance(held, Value) and held.role == "parameter":
        raise MutationError(
            f"{lifter.source}: the forward writes into parameter {held.name!r}, which the "
            "optimizer owns: compute a new tensor instead (a parametrisation), or write it between "
            "steps; between two numbers, as in weight.data.clamp_(-1, 1), it may be written ahead "
            "of all that reads it; one that only the forward moves, as an average of others, has "
            "requires_grad=False"
        )


def refuse_assignment(lifter: Lifter, node: fx.Node) -> None:
    held = lifter.read(node)
    name = f" {held.name!r}" if isinstance(held, Value) and held.name else ""
    raise MutationError(
        f"{lifter.source}: the forward assigns to .data of a tensor{name}, which no gradient and "
        "no program sees: compute a new tensor instead"
    )


def check_writes(lifter: Lifter, node: fx.Node) -> None:
    """Refuses what writes into an operand by another way than an in-place op of torch."""
    schema = schema_of(node.target)
    known = (*_STATISTICS, "detach_")
    if not schema.is_mutable or is_inplace(node.target) or op_name(node.target) in known:
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
