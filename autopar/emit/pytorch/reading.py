"""What the items of a forward read from one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.emit.pytorch.loops import Loop
from autopar.lowering.lowered import Lowered, LoweredOp, Operand
from autopar.lowering.scopes import Scope

Item = LoweredOp | Scope | Loop


def count_uses(
    items: Iterable[Item], outputs: Iterable[Operand], lowered: Lowered
) -> dict[str, int]:
    """How often each value is asked for by ``items`` and the return."""
    uses: dict[str, int] = {}
    names = [n for item in items for n in reads(item, lowered)] + [o.name for o in outputs]
    for name in names:
        uses[name] = uses.get(name, 0) + 1
    return uses


def reads(item: Item, lowered: Lowered) -> list[str]:
    """Values that an item reads from its surroundings, once for each time it asks for them."""
    if isinstance(item, Loop):
        names = []
        for i, call in enumerate(item.calls):
            for operand, result, slice_ in zip(
                call.operands, item.carried, item.slices, strict=True
            ):
                if not (slice_ and slice_.alone) and (i == 0 or result is None):
                    names.append(operand.name)
        names += [s.op.op.inputs[0] for s in item.slices if s and s.alone]
        return [n for n in names if is_value(lowered, n)]
    if isinstance(item, Scope):
        made = {n for op in item.ops() for n in op.op.outputs}
        wanted = (n for op in item.ops() for n in op.op.inputs)
        return [n for n in dict.fromkeys(wanted) if n not in made and is_value(lowered, n)]
    return [o.name for o in item.operands if is_value(lowered, o.name)]


def is_value(lowered: Lowered, name: str) -> bool:
    """Whether a tensor lives in a variable: no parameter that is read where it is used."""
    value = lowered.tensors[name]
    return value.tensor.role not in ("parameter", "buffer") or bool(value.steps)


def interface(
    scope: Scope, lowered: Lowered, uses: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    """(tensors that a scope reads from outside, tensors made inside and read outside)."""
    made = [n for op in scope.ops() for n in op.op.outputs]
    inputs = reads(scope, lowered)
    outputs = [n for n in made if uses.get(n, 0) > 0]
    return inputs, outputs
