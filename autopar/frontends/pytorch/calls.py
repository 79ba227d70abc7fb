"""Calls of repeated layers during the trace: the first of a kind runs, later ones are one op.

A call is of a kind with an earlier one when the layers are built alike (`repeats`) and the
arguments agree: the same structure, constants, shapes and dtypes, and the same arguments being one
tensor. The trace then records for every call exactly which tensors it read and made::

    inside = autopar::enter(arguments, kind)    the first call: its ops stand between these two
    outside = autopar::leave(results, kind)
    outside = autopar::call(arguments, kind)    every later call
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from autopar.frontends.pytorch.repeats import Counter, Member
from autopar.runtime.torch_private import FakeTensor, without_modes, without_torch_function


class NotAlike(Exception):
    """Internal: the trace has to be taken again with the layers of ``group`` told apart."""

    def __init__(self, group: int, why: str, *, repeated: bool = False) -> None:
        super().__init__(why)
        self.group, self.why, self.repeated = group, why, repeated


@dataclass(slots=True)
class Kind:
    """Calls that are alike.

    shared:  full names of tensors in the first layer that all of them have in common.
    results: meta tensors like those that the first call made; ``mode`` fakes them again.
    """

    number: int
    group: int
    class_name: str
    argument_names: tuple[str, ...]
    paths: list[str]
    shared: frozenset[str]
    results: list[torch.Tensor] = field(default_factory=list)
    mode: Any = None
    structure: Any = None  # the returned value, tensors as _Made or _Given


@dataclass(frozen=True, slots=True)
class _Made:
    index: int


@dataclass(frozen=True, slots=True)
class _Given:
    index: int


def _like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors
    ]


def _declare() -> None:
    for name in ("enter", "leave", "call"):
        torch.library.define(f"autopar::{name}", "(Tensor[] tensors, int kind) -> Tensor[]")

    for name in ("enter", "leave"):
        torch.library.register_fake(f"autopar::{name}", lambda tensors, kind: _like(tensors))


_declare()


def _again(kind: Kind, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Writes one op ``autopar::call`` into the trace; dispatching it would cost milliseconds."""
    mode = get_proxy_mode()
    if not kind.results or mode is None:
        return []
    tracer: Any = mode.tracer
    with without_torch_function():
        operands = [tracer.unwrap_proxy(t) for t in tensors]
        op = torch.ops.autopar.call.default
        proxy = tracer.create_proxy("call_function", op, (operands, kind.number), {})
        made: list[torch.Tensor] = [
            FakeTensor(kind.mode, t, torch.device("cpu")) for t in kind.results
        ]
        track_tensor_tree(made, proxy, constant=None, tracer=tracer)
    return made


Note = Callable[[FrameType | None], None]


class Calls:
    """Patches the forward of repeated layers; ``kinds`` is what it met.

    apart:    groups whose members are not to be taken as alike.
    repeated: groups of one member that turned out to be called several times.
    note:     told of the calling frame before an op is written by hand.
    """

    def __init__(
        self, members: Mapping[int, Member], apart: set[int], repeated: set[int], note: Note
    ) -> None:
        self.members = [m for m in members.values() if m.group not in apart]
        self.repeated = repeated
        self.note = note
        self.kinds: list[Kind] = []
        self._by_key: dict[Hashable, Kind] = {}
        self._seen: set[Hashable] = set()
        self._inside = False

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Inside, calls of the members go through here."""
        patched: list[Member] = []
        try:
            for member in self.members:
                if "forward" in vars(member.module):
                    continue  # someone else's patch: leave it alone
                patched.append(member)
                member.module.forward = self._wrap(member)
            yield
        finally:
            for member in patched:
                del vars(member.module)["forward"]

    def _wrap(self, member: Member) -> Callable[..., Any]:
        forward = member.module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            tensors, structure = take_apart((args, kwargs))
            key = (member.group, structure, tuple(map(_shape, tensors)), _modes())
            if member.alone and member.group not in self.repeated:
                if key in self._seen:
                    raise NotAlike(member.group, "called more than once", repeated=True)
                self._seen.add(key)
                return forward(*args, **kwargs)
            kind = self._by_key.get(key)
            if kind is not None:
                kind.paths.append(member.path)
                self.note(sys._getframe(1))
                return put_together(kind.structure, tensors, _again(kind, tensors))
            kind = Kind(
                len(self.kinds),
                member.group,
                type(member.module).__name__,
                tuple(_argument_names(forward, args, kwargs)),
                [member.path],
                member.shared,
            )
            self.kinds.append(kind)
            self._by_key[key] = kind
            return self._first(kind, member, forward, tensors, structure)

        return call

    def _first(
        self, kind: Kind, member: Member, forward: Any, tensors: list[torch.Tensor], structure: Any
    ) -> Any:
        """Runs the layer between the two marks."""
        given = torch.ops.autopar.enter(tensors, kind.number)
        args, kwargs = put_together(structure, given, [])
        before = _state(member, structure)
        self._inside = True
        try:
            with _watched(member) as counters:
                result = forward(*args, **kwargs)
        finally:
            self._inside = False
        if any(c.used for c in counters):
            raise NotAlike(member.group, "the forward computes with the layer's own number")
        if _state(member, structure) != before or take_apart((args, kwargs))[1] != structure:
            raise NotAlike(member.group, "the forward leaves something behind in an object")
        found, shape = take_apart(result)
        place = {id(t): _Given(i) for i, t in enumerate(given)}
        new: list[torch.Tensor] = []
        slots: list[_Given | _Made] = []
        for tensor in found:
            if id(tensor) in place:
                slots.append(place[id(tensor)])
            else:
                slots.append(_Made(len(new)))
                new.append(tensor)
        kind.structure = _renumber(shape, slots)
        if new:
            kind.mode = new[0].fake_mode  # type: ignore[attr-defined]
            with without_modes():
                kind.results = [
                    torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                    for t in new
                ]
        made = torch.ops.autopar.leave(new, kind.number)
        return put_together(kind.structure, tensors, made)


@contextmanager
def _watched(member: Member) -> Iterator[list[Counter]]:
    """Inside, the integers that count the members note whether they are computed with."""
    places = [(vars(member.module.get_submodule(path)), name) for path, name in member.counters]
    counters = [Counter(table[name]) for table, name in places]
    for (table, name), counter in zip(places, counters, strict=True):
        table[name] = counter
    try:
        yield counters
    finally:
        for (table, name), counter in zip(places, counters, strict=True):
            table[name] = int.__int__(counter)


def _state(member: Member, structure: Any) -> Any:
    """What a forward could change besides its result: attributes, and objects that it was given."""
    counted = set(member.counters)
    own = [
        (name, id(value))
        for path, m in member.module.named_modules()
        for name, value in vars(m).items()
        if (path, name) not in counted
    ]
    return own, [_fields(leaf) for leaf in _objects(structure)]


def _fields(value: Any, depth: int = 3) -> Any:
    if isinstance(value, list | tuple | set):
        return [_fields(v, depth - 1) for v in value] if depth else len(value)
    fields = getattr(value, "__dict__", None)
    if depth and fields is not None:
        return {name: _fields(v, depth - 1) for name, v in fields.items()}
    return id(value)


# -- arguments and results as a list of distinct tensors and a structure around them --------------


@dataclass(frozen=True, slots=True)
class _Object:
    """A value that is no tensor and no container; equal when equal constants or one object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Object):
            return NotImplemented
        return _constant(self.value) == _constant(other.value)

    def __hash__(self) -> int:
        return hash(_constant(self.value))


def _constant(value: Any) -> Hashable:
    plain = bool | int | float | complex | str | bytes | torch.dtype | torch.device
    if value is None or isinstance(value, plain):
        return (type(value), value)
    return id(value)


def take_apart(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The distinct tensors in ``value``, and ``value`` with `_Given` in their places."""
    tensors: list[torch.Tensor] = []
    place: dict[int, int] = {}

    def walk(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            if id(v) not in place:
                place[id(v)] = len(tensors)
                tensors.append(v)
            return _Given(place[id(v)])
        if isinstance(v, dict):
            return (type(v), tuple((k, walk(x)) for k, x in v.items()))
        if isinstance(v, list | tuple):
            return (type(v), tuple(map(walk, v)))
        return _Object(v)

    return tensors, walk(value)


def put_together(structure: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> Any:
    """The inverse of `take_apart`."""
    if isinstance(structure, _Given):
        return given[structure.index]
    if isinstance(structure, _Made):
        return made[structure.index]
    if isinstance(structure, _Object):
        return structure.value
    kind, parts = structure
    if issubclass(kind, dict):
        items = {k: put_together(v, given, made) for k, v in parts}
        return items if kind is dict else kind(**items)
    values = [put_together(v, given, made) for v in parts]
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def _renumber(structure: Any, slots: list[_Given | _Made]) -> Any:
    if isinstance(structure, _Given):
        return slots[structure.index]
    if isinstance(structure, _Object):
        return structure
    kind, parts = structure
    if issubclass(kind, dict):
        return (kind, tuple((k, _renumber(v, slots)) for k, v in parts))
    return (kind, tuple(_renumber(v, slots) for v in parts))


def _objects(structure: Any) -> Iterator[Any]:
    if isinstance(structure, _Object):
        yield structure.value
    elif isinstance(structure, tuple):
        kind, parts = structure
        for part in parts:
            yield from _objects(part[1] if issubclass(kind, dict) else part)


def _modes() -> Hashable:
    """What a layer computes by beside its arguments."""
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.is_grad_enabled(), cast


def _shape(tensor: torch.Tensor) -> Hashable:
    return (tuple(tensor.shape), tensor.dtype)


def _argument_names(forward: Any, args: Any, kwargs: Any) -> list[str]:
    """A name for each distinct tensor: ``mask``, ``position_embeddings.0``."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {**{f"arg{i}": a for i, a in enumerate(args)}, **kwargs}
    names: dict[int, str] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), name)
        elif isinstance(value, dict):
            for k, v in value.items():
                walk(v, f"{name}.{k}")
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                walk(v, f"{name}.{i}")

    for name, value in bound.items():
        walk(value, name)
    return [names.get(id(t), f"input{i}") for i, t in enumerate(take_apart((args, kwargs))[0])]
