"""Shared experts as an argument of the routed ones' call, where a plan has them run beside."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.emit.pytorch.site import EmitError
from autopar.lowering.lowered import Lowered, LoweredOp, LoweredTensor, Operand
from autopar.lowering.shared_experts import beside_of
from autopar.nouns.graph import Graph

RUN_BESIDE = "beside"
"""The attr of calls whose last operand is what runs beside, and whose last result is what that
gives."""
_GIVEN = "#beside"
"""Behind the name of what a module gives, that of the same as the call returns it."""


def given_name(name: str) -> str:
    """The plan's name of a tensor."""
    return name.removesuffix(_GIVEN)


def run_beside(lowered: Lowered) -> Lowered:
    """``lowered`` with modules directly in front of the calls that they run beside, and read by
    these alone, which return what they give."""
    for op in lowered.ops if lowered.beside else ():
        if inside := beside_of(lowered, op):
            lowered = _joined(lowered, op, inside)
    return lowered


def _joined(lowered: Lowered, experts: LoweredOp, inside: Collection[LoweredOp]) -> Lowered:
    names = {op.op.name for op in inside}
    made = {name for op in inside for name in op.op.outputs}
    others = [op for op in lowered.ops if op.op.name not in names]
    read = {operand.name for op in others for operand in op.operands}
    given = made & read
    if len(given) != 1:
        raise EmitError(f"{experts.op.name}: what runs beside gives {len(given)} results")
    (name,) = given
    value, new = lowered.tensors[name], name + _GIVEN
    returned = replace(value.tensor, name=new)
    tensors = {
        **lowered.tensors,
        name: LoweredTensor(value.tensor, value.produced, value.produced, ()),
        new: LoweredTensor(returned, value.produced, value.shared, value.steps),
    }
    others = [_renamed(op, name, new) for op in others]
    call = next(op for op in others if op.op.name == experts.op.name)
    operand = Operand(name, value.produced, (), value.tensor.differentiable)
    own = replace(
        call.op,
        inputs=(*call.op.inputs, name),
        outputs=(*call.op.outputs, new),
        attrs={**call.op.attrs, RUN_BESIDE: True},
    )
    joined = replace(
        call, op=own, operands=(*call.operands, operand), results=(*call.results, value.produced)
    )
    place = others.index(call)
    ops = (*others[:place], *inside, joined, *others[place + 1 :])
    graph: Graph = replace(lowered.graph, tensors={**lowered.graph.tensors, new: returned})
    lies, apart = lowered.zigzag, lowered.apart
    if lies is not None and name in lies:
        lies = {**lies, new: lies[name]}
    apart = apart | {new} if name in apart else apart
    return replace(lowered, graph=graph, tensors=tensors, ops=ops, zigzag=lies, apart=apart)


def _renamed(op: LoweredOp, name: str, new: str) -> LoweredOp:
    if name not in op.op.inputs:
        return op
    inputs = tuple(new if n == name else n for n in op.op.inputs)
    operands = tuple(replace(o, name=new) if o.name == name else o for o in op.operands)
    return replace(op, op=replace(op.op, inputs=inputs), operands=operands)
