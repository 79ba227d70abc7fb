"""What the variable of a result may be called, by what the op is and where it stands."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.emit.names import preferred
from autopar.nouns.graph import Op, Tensor

WEIGHTS = frozenset("weight kernel w".split())  # they say nothing beside the path before them


def by_module(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """A name by kind and module, which is that of a product's parameter."""
    roles = {name: tensors[name].role for name in op.inputs}
    owner = next((n for n, role in roles.items() if role == "parameter"), op.name)
    head, _, last = owner.rpartition(".")
    if owner == op.name:
        return preferred(owner, op.kind)
    return preferred(f"{head if last in WEIGHTS else owner}/", op.kind)


def is_centred_square(name: str, makers: Mapping[str, Op]) -> bool:
    """Whether a value is the square of a difference, whose mean is a variance."""
    square = makers.get(name)
    less = makers.get(square.inputs[0]) if square and square.kind == "square" else None
    return less is not None and less.kind == "sub"
