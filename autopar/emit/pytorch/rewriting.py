"""What rewrites of a lowered graph share: who makes and who reads a value, and ops nobody reads.

Rewrites happen before a program is printed and change its text alone: ops that say together what
one call says become that call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.lowering.lowered import Lowered, LoweredOp, Operand


@dataclass(frozen=True, slots=True)
class Links:
    """Makers and readers of values, at the time of asking; ``lowered.graph`` may be older."""

    lowered: Lowered
    makers: Mapping[str, LoweredOp]
    readers: Mapping[str, tuple[LoweredOp, ...]]
    returned: frozenset[str]

    @staticmethod
    def of(lowered: Lowered) -> Links:
        makers = {name: op for op in lowered.ops for name in op.op.outputs}
        readers: dict[str, list[LoweredOp]] = {}
        for op in lowered.ops:
            for operand in op.operands:
                readers.setdefault(operand.name, []).append(op)
        returned = frozenset(o.name for o in lowered.outputs)
        return Links(lowered, makers, {n: tuple(r) for n, r in readers.items()}, returned)

    def feeder(self, operand: Operand) -> LoweredOp | None:
        """The op that makes an operand for this reader alone, with nothing moved in between."""
        maker = self.makers.get(operand.name)
        if maker is None or operand.steps or self.lowered.tensors[operand.name].steps:
            return None
        alone = len(self.readers.get(operand.name, ())) == 1 and operand.name not in self.returned
        return maker if alone and len(maker.op.outputs) == 1 else None


def remade(
    op: LoweredOp, kind: str, operands: tuple[Operand, ...], attrs: Mapping[str, object]
) -> LoweredOp:
    """``op`` as another call that gives the same results."""
    names = tuple(o.name for o in operands)
    made = replace(op.op, kind=kind, inputs=names, attrs=dict(attrs))
    return replace(op, op=made, operands=operands)


def swapped(lowered: Lowered, new: Mapping[str, LoweredOp]) -> Lowered:
    """``lowered`` with ops replaced, by name, and without those that nobody reads any more; but for
    replacements by which parameters would lose their gradients of zeros with those."""
    made = _replaced(lowered, new)
    if not _loses_gradients(lowered, made):
        return made
    harmless: dict[str, LoweredOp] = {}
    for name, op in new.items():
        if not _loses_gradients(lowered, _replaced(lowered, {**harmless, name: op})):
            harmless[name] = op
    return _replaced(lowered, harmless)


def _replaced(lowered: Lowered, new: Mapping[str, LoweredOp]) -> Lowered:
    if not new:
        return lowered
    before = Links.of(lowered)
    kept: list[LoweredOp] = []
    wanted = {o.name for o in lowered.outputs}
    for old in reversed(lowered.ops):
        op = new.get(old.op.name, old)
        unread_before = not any(n in before.readers or n in wanted for n in old.op.outputs)
        if unread_before or wanted.intersection(op.op.outputs):
            kept.append(op)
            wanted.update(o.name for o in op.operands)
    return replace(lowered, ops=tuple(reversed(kept)))


def _loses_gradients(before: Lowered, made: Lowered) -> bool:
    """Whether a gradient flowed into something that nobody reads any more, or out of a block."""
    if made is before:
        return False
    left = {op.op.name for op in made.ops}
    gone = [op for op in before.ops if op.op.name not in left]
    unread = _read(before) - _read(made) - {name for op in gone for name in op.op.outputs}
    blocks = any(op.op.kind == "block" for op in gone)
    return blocks or any(before.tensors[name].tensor.differentiable for name in unread)


def _read(lowered: Lowered) -> set[str]:
    """What ops read, and what is returned."""
    return {o.name for op in lowered.ops for o in op.operands} | {o.name for o in lowered.outputs}
