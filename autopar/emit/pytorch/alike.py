"""Forwards that compute the same take the same names, so that they become one class.

Two modules of one class are often lowered to the same ops, and yet differ in what surrounds them:
one is a block and has the argument names of the model, another stands alone. The first that is
printed lends its names to all that come after. Whether they are one class, their text decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.emit.roles import Known
from autopar.lowering.lowered import Lowered, Operand
from autopar.lowering.scopes import Scope

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Printed:
    """What named the values of a forward.

    order:     its tensors in the order in which its ops come to them.
    arguments: their variables, by tensor.
    """

    order: tuple[str, ...]
    arguments: Mapping[str, str]
    known: Known


@dataclass(slots=True)
class Alike:
    """The forwards printed so far, by what they compute."""

    _first: dict[Key, Printed] = field(default_factory=dict)

    def names(
        self,
        scope: Scope,
        lowered: Lowered,
        inputs: Sequence[str],
        outputs: Sequence[Operand],
        own: Printed,
    ) -> Printed:
        """``own``, or what the first forward of its kind had in its place."""
        order = _order(scope, inputs)
        place = {name: i for i, name in enumerate(order)}
        key = _key(scope, lowered, place, inputs, outputs)
        first = self._first.setdefault(key, Printed(tuple(order), own.arguments, own.known))
        if first.order == tuple(order):
            return first
        renamed = dict(zip(first.order, order, strict=True))
        known = first.known

        def lent(names: Mapping[str, str]) -> dict[str, str]:
            return {new: names[old] for old, new in renamed.items() if old in names}

        lent_known = Known(lent(known.roles), lent(known.assigned), lent(known.statements))
        return Printed(tuple(order), lent(first.arguments), lent_known)


def _order(scope: Scope, inputs: Sequence[str]) -> list[str]:
    """Inputs that no op reads come last."""
    read = (name for op in scope.ops() for name in (*op.op.inputs, *op.op.outputs))
    return list(dict.fromkeys((*read, *inputs)))


def _key(
    scope: Scope,
    lowered: Lowered,
    place: Mapping[str, int],
    inputs: Sequence[str],
    outputs: Sequence[Operand],
) -> Key:
    start = len(scope.path) + 1 if scope.path else 0
    tensors = lowered.graph.tensors
    held = tuple((place[n], n[start:]) for n in place if tensors[n].role in ("parameter", "buffer"))
    ops = tuple((op.op.kind, _places(op.op.inputs, place)) for op in scope.ops())
    return held, ops, _places(inputs, place), _places([o.name for o in outputs], place)


def _places(names: Sequence[str], place: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(place[name] for name in names)
