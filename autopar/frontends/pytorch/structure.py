"""Values that calls take and return: a list of distinct tensors and a structure around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

_ATOMS = frozenset(
    (type(None), bool, int, str, bytes, type(...), type(NotImplemented),
     torch.dtype, torch.device, torch.layout, torch.memory_format)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """The tensor at ``index`` of those that a call made."""

    index: int


@dataclass(frozen=True, slots=True)
class Given:
    """The tensor at ``index`` of those that a call was given."""

    index: int


class Leaf:
    """A value that is no tensor and no container; equal when equal constants or one object."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = constant(value)

    def equals(self, value: Any) -> bool:
        """Whether ``Leaf(value)`` is this one."""
        if value is self.value and type(value) in _ATOMS:
            return True
        return bool(self.key == constant(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaf) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)

    @property
    def fixed(self) -> bool:
        """Its value cannot change, so that equal leaves stay equal."""
        return self.key is not None and bool(self.key[0] != "object")


def constant(value: Any) -> tuple[Any, ...]:
    """Equal for values that no program can tell apart; else ``("object", id)``."""
    kind = type(value)
    if kind in _ATOMS:
        return (kind, value)
    if kind is float:
        return (kind, value.hex())  # 0.0 is not -0.0, and nan is nan
    if kind is complex:
        return (kind, value.real.hex(), value.imag.hex())
    if isinstance(value, type | Enum):
        return (kind, value)
    if isinstance(value, set | frozenset):
        parts = [constant(v) for v in value]
        if all(p[0] != "object" for p in parts):
            return (kind, frozenset(parts))
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        return (kind, str(value.dtype), value.shape, value.tobytes())
    return ("object", id(value))


def take_apart(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The distinct tensors in ``value``, and ``value`` with `Given` in their places."""
    tensors: list[torch.Tensor] = []
    place: dict[int, int] = {}

    def walk(v: Any) -> Any:
        kind = type(v)
        if kind in _ATOMS:  # most are, and asking for a tensor is slow
            return Leaf(v)
        if kind is tuple or kind is list:
            return (kind, tuple([walk(x) for x in v]))
        if isinstance(v, torch.Tensor):
            if id(v) not in place:
                place[id(v)] = len(tensors)
                tensors.append(v)
            return Given(place[id(v)])
        if isinstance(v, dict):
            return (type(v), tuple((k, walk(x)) for k, x in v.items()))
        if isinstance(v, list | tuple):
            return (type(v), tuple(map(walk, v)))
        if isinstance(v, slice):
            return (slice, (walk(v.start), walk(v.stop), walk(v.step)))
        return Leaf(v)

    return tensors, walk(value)


def put_together(structure: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> Any:
    """The inverse of `take_apart`."""
    if isinstance(structure, Given):
        return given[structure.index]
    if isinstance(structure, Made):
        return made[structure.index]
    if isinstance(structure, Leaf):
        return structure.value
    kind, parts = structure
    if issubclass(kind, dict):
        items = {k: put_together(v, given, made) for k, v in parts}
        return items if kind is dict else kind(**items)
    values = [put_together(v, given, made) for v in parts]
    return kind(*values) if hasattr(kind, "_fields") or kind is slice else kind(values)


def renumber(structure: Any, slots: list[Given | Made]) -> Any:
    """``structure`` with ``slots[i]`` in place of ``Given(i)``."""
    if isinstance(structure, Given):
        return slots[structure.index]
    if isinstance(structure, Leaf):
        return structure
    kind, parts = structure
    if issubclass(kind, dict):
        return (kind, tuple((k, renumber(v, slots)) for k, v in parts))
    return (kind, tuple(renumber(v, slots) for v in parts))


def leaves(structure: Any) -> Iterator[Leaf]:
    """Every `Leaf` of ``structure``."""
    if isinstance(structure, Leaf):
        yield structure
    elif isinstance(structure, tuple):
        kind, parts = structure
        for part in parts:
            yield from leaves(part[1] if issubclass(kind, dict) else part)
