"""Repeated layers, found before anything is traced: which submodules are built alike.

A module by itself may repeat too, where a forward calls it again and again (a cell in a loop over
time, an encoder of two inputs): it is a group of one.

Two members of a container are alike when their signatures are equal: class tree, parameters and
buffers by shape and dtype, sharing, and every other attribute but integers that only count the
members (``layer_idx``). That their tensors correspond is what folding needs of it; the rest spares
tracing layers as alike that are not. Whether they compute the same is seen when they run
(`recording`).
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autopar.torch_private.modules import buffers_of, parameters_of, unsaved_of

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""
_HOOKS = tuple(n for n in INTERNAL if n.endswith("_hooks"))
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
TOWERS = 3
"""Stacks of layers that stand side by side: encoder, decoder, teacher."""
HANDED = 16
"""Tensors that a call may be handed beside what it computes with."""
_DEPTH = 4  # how deep plain objects in attributes are compared by value


@dataclass(frozen=True, slots=True)
class Member:
    """A submodule that may repeat; ``group`` is equal for members built alike.

    alone:  no other member of the model is built like this one.
    shared: full names of its tensors that other modules hold too.
    """

    path: str
    module: nn.Module
    group: int
    alone: bool
    shared: frozenset[str]


def find_repeats(model: nn.Module) -> dict[int, Member]:
    """Every submodule that may repeat, by ``id``."""
    paths = {id(m): path for path, m in model.named_modules()}
    owners = Tally(id(t) for m in model.modules() for t in _tensors(m))
    groups: dict[Hashable, int] = {}
    members: list[tuple[nn.Module, int, frozenset[str]]] = []
    for siblings in _runs(model):
        shared = _shared(siblings, owners)
        shapes = [_signature(m, shared) for m in siblings]
        counting = _counting([ints for _, ints in shapes])
        for module, (shape, ints) in zip(siblings, shapes, strict=True):
            kept = tuple(sorted((k, v) for k, v in ints.items() if k not in counting))
            group = groups.setdefault((shape, kept), len(groups))
            members.append((module, group, _names(model, shared)))
    for module in _singles(model, {id(m) for m, _, _ in members}):
        members.append((module, len(groups), _names(model, _shared([module], owners))))
        groups[id(module)] = len(groups)
    sizes = Tally(group for _, group, _ in members)
    stacks = _stacks({id(m): group for m, group, _ in members}, members)
    return {
        id(m): Member(paths[id(m)], m, group, sizes[group] == 1, common)
        for m, group, common in members
        if id(m) not in stacks
    }


def _stacks(
    groups: Mapping[int, int], members: Sequence[tuple[nn.Module, int, frozenset[str]]]
) -> set[int]:
    """Members that are nothing but layers which repeat themselves, as an encoder and a decoder of
    one class are: their layers fold, and a pipeline is cut between them."""
    sizes = Tally(groups.values())
    stacks: set[int] = set()
    for outer, group, _ in members:
        if not 1 < sizes[group] <= TOWERS:
            continue
        lists = [m for m in outer.modules() if isinstance(m, _LISTS)]
        within = Tally(groups[id(m)] for held in lists for m in held.children() if id(m) in groups)
        if max(within.values(), default=0) < 2:
            continue
        inner = {
            id(leaf)
            for m in outer.modules()
            if m is not outer and within.get(groups.get(id(m), -1), 0) > 1
            for leaf in m.modules()
        }
        beside = [m for m in outer.modules() if id(m) not in inner]
        if sum(1 for m in beside if next(iter(_tensors(m)), None) is not None) <= 1:
            stacks.add(id(outer))
    return stacks


def can_be_lent(member: Member) -> bool:
    """Whether a call that is handed all of its tensors still reads well."""
    return sum(1 for m in member.module.modules() for _ in _tensors(m)) <= HANDED


def lent(member: Member, group: int, model: nn.Module) -> Member:
    """``member`` as the only one of ``group``, with no tensors of its own: each call is handed
    them."""
    inside = {id(t) for m in member.module.modules() for t in _tensors(m)}
    return replace(member, group=group, alone=True, shared=_names(model, inside))


def _names(model: nn.Module, tensors: set[int]) -> frozenset[str]:
    if not tensors:
        return frozenset()
    named = (*model.named_parameters(), *model.named_buffers())
    return frozenset(name for name, t in named if id(t) in tensors)


def _runs(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Siblings with children of their own: members of a list, or of one class in one parent."""
    seen: set[int] = set()
    for parent in model.modules():
        children = [c for c in parent.children() if id(c) not in seen and any(c.children())]
        if not isinstance(parent, nn.ModuleList):
            classes = Tally(type(c) for c in children)
            children = [c for c in children if classes[type(c)] > 1]
        children = [c for c in children if not _holds(c)]
        seen.update(map(id, children))
        if children:
            yield children


def _singles(model: nn.Module, members: set[int]) -> Iterator[nn.Module]:
    """Modules that stand for more than one op, with no members inside, which fold better alone."""
    inside = {id(c) for m in model.modules() if id(m) in members for c in m.modules()}
    for module in model.modules():
        if module is model or id(module) in inside or _holds(module):
            continue
        several = isinstance(module, nn.RNNCellBase) or any(module.children())
        if several and not any(id(m) in members for m in module.modules()):
            yield module


def _holds(module: nn.Module) -> bool:
    """A list or a table of modules, which is not called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for table in (parameters_of(module), buffers_of(module)):
        yield from (t for t in table.values() if t is not None)


def _shared(siblings: list[nn.Module], owners: Tally[int]) -> set[int]:
    """Tensors that some sibling has in common with another or with the rest of the model."""
    shared: set[int] = set()
    seen: set[int] = set()
    for module in siblings:
        inside = Tally(id(t) for m in module.modules() for t in _tensors(m))
        shared.update(t for t, count in inside.items() if count != owners[t] or t in seen)
        seen.update(inside)
    return shared


Ints = dict[tuple[str, str], int]


def _signature(module: nn.Module, shared: set[int]) -> tuple[Hashable, Ints]:
    """What must be equal, and apart from it the integer attributes by (path, name)."""
    ints: Ints = {}
    first: dict[int, str] = {}
    parts: list[Hashable] = []
    inside = {id(m): path for path, m in module.named_modules()}
    for path, m in module.named_modules():
        parts.append((path, id(type(m)), id(m) if _is_shared_module(m, shared) else None))
        for table in (parameters_of(m), buffers_of(m)):
            for name, t in table.items():
                if t is None:
                    parts.append((name, None))
                    continue
                place = first.setdefault(id(t), f"{path}.{name}")
                same = id(t) if id(t) in shared else place
                kept = name in unsaved_of(m)
                parts.append((name, tuple(t.shape), t.dtype, t.requires_grad, same, kept))
        parts.append(tuple(id(h) for name in _HOOKS for h in (vars(m)[name] or {}).values()))
        for name, value in vars(m).items():
            if name in INTERNAL and name != "training":
                continue
            if type(value) is int:
                ints[path, name] = value
            else:
                parts.append((name, _value(value, inside, _DEPTH)))
    return tuple(parts), ints


def _is_shared_module(module: nn.Module, shared: set[int]) -> bool:
    return any(id(t) in shared for t in _tensors(module))


def _counting(tables: list[Ints]) -> tuple[tuple[str, str], ...]:
    """Attributes whose value is the member's place plus a constant, in all members that have it."""
    if len(tables) < 2:
        return ()
    offsets: dict[tuple[str, str], set[int]] = {}
    holders: Tally[tuple[str, str]] = Tally()
    for place, ints in enumerate(tables):
        for key, value in ints.items():
            offsets.setdefault(key, set()).add(value - place)
            holders[key] += 1
    return tuple(sorted(k for k, o in offsets.items() if len(o) == 1 and holders[k] > 1))


def _value(value: Any, inside: dict[int, str], depth: int) -> Hashable:
    """``value`` as something equal for equal values; what cannot be compared is its identity.

    Modules of the member (``inside``: their paths by id) are their paths.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, id(value))
    if isinstance(value, torch.dtype | torch.device | torch.Size | type):
        return value
    if id(value) in inside:
        return ("module", inside[id(value)])
    if depth == 0:
        return id(value)

    def down(part: Any) -> Hashable:
        return _value(part, inside, depth - 1)

    if isinstance(value, list | tuple):
        return (type(value), tuple(map(down, value)))
    if isinstance(value, dict):
        return (type(value), len(value), tuple((k, down(v)) for k, v in value.items() if _plain(k)))
    if isinstance(value, set | frozenset) and all(map(_plain, value)):
        return (type(value), tuple(sorted(map(repr, value))))
    if isinstance(value, MethodType):
        return (value.__func__, down(value.__self__))
    if isinstance(value, partial):
        return ("partial", down(value.func), down(value.args), down(value.keywords))
    if isinstance(value, FunctionType):
        cells = [down(c.cell_contents) for c in value.__closure__ or ()]
        return ("function", value.__code__, down(value.__defaults__), tuple(cells))
    return id(value)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
