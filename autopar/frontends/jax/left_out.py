"""Layers written out one after the other, most of them left out before they are looked at.

Layers in a Python loop are as many equal runs of equations of a jaxpr. What is said of three of
them holds for all: the others are cut out of the jaxpr, the draft is made and folded without them,
and they are put back as what they are by then, more instances of one block. Where any of that does
not hold, the loss is captured with all its layers.

An equation is of layer i when it depends on parameters of layer i and on none of a later one; the
run of layer i ends with its last equation, and begins behind that of the layer before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import jax.extend.core as jex
import numpy as np

from autopar.frontends.jax.draft import Draft, Node

FIRST, LAST = 2, 1
"""Layers of a run of equal ones that stay: at its start, so that what each gives the next is seen,
and at its end."""
FEWEST = 8
"""Equal layers from which on any are left out."""
_INDEX = re.compile(r"(?:(.*)\.)?(0|[1-9][0-9]*)\.(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Layers ``first`` to ``end - 1`` of the list of them at ``prefix``, a path in the tree of
    parameters; ``paths``: of their parameters."""

    prefix: str
    first: int
    end: int
    paths: frozenset[str]

    def name(self, index: int) -> str:
        """That of the layer as an instance of a block."""
        return f"{self.prefix}.{index}" if self.prefix else str(index)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that are left out."""
        return tuple(map(self.name, range(self.first, self.end)))


def without_layers(closed: Any, paths: Sequence[str]) -> tuple[Any, LeftOut | None]:
    """The closed jaxpr without most layers of its longest run of equal ones, and which these are;
    None where there are too few.

    ``paths``: of its operands that are parameters, which come first.
    """
    best: tuple[int, _Layers] | None = None
    run = (0, 0)
    for prefix, owners in _lists(closed.jaxpr, paths).items():
        layers = _Layers.of(closed.jaxpr, prefix, owners)
        first, end = (0, 0) if layers is None else layers.longest()
        if layers is not None and end - first >= FEWEST and (not best or end - first > best[0]):
            best, run = (end - first, layers), (first, end)
    if best is None:
        return closed, None
    return best[1].without(closed, run[0] + FIRST, run[1] - LAST)


def _lists(jaxpr: Any, paths: Sequence[str]) -> dict[str, dict[Any, tuple[int, str]]]:
    """For each list of layers its parameters: of which layer, and the path there."""
    lists: dict[str, dict[Any, tuple[int, str]]] = {}
    for var, path in zip(jaxpr.invars, paths, strict=False):
        if match := _INDEX.fullmatch(path):
            lists.setdefault(match[1] or "", {})[var] = int(match[2]), match[3]
    return {
        prefix: owners
        for prefix, owners in lists.items()
        if len({index for index, _ in owners.values()}) >= FEWEST
    }


@dataclass(frozen=True, slots=True)
class _Layers:
    """The equations of a list of layers.

    owners: of each parameter its layer and its path there; own: of each layer its parameters.
    ends:   of each layer the equation behind its last; the first layer's run has what is in front
            of it too, and the last one's may not be told from what follows.
    place:  of each result of an equation in a layer that layer, and its number there.
    """

    jaxpr: Any
    prefix: str
    owners: Mapping[Any, tuple[int, str]]
    own: tuple[Mapping[str, Any], ...]
    ends: tuple[int, ...]
    place: Mapping[Any, tuple[int, int]]

    @staticmethod
    def of(jaxpr: Any, prefix: str, owners: Mapping[Any, tuple[int, str]]) -> _Layers | None:
        """None where layers do not stand one behind the other."""
        count = 1 + max(index for index, _ in owners.values())
        level = {var: index for var, (index, _) in owners.items()}
        last = [0] * count
        for at, eqn in enumerate(jaxpr.eqns):
            of = max((level.get(v, -1) for v in _variables(eqn.invars)), default=-1)
            if of >= 0:
                last[of] = at + 1
                level.update(dict.fromkeys(eqn.outvars, of))
        if any(a >= b for a, b in pairwise(last)):
            return None
        place: dict[Any, tuple[int, int]] = {}
        for index, (start, end) in enumerate(zip((0, *last), last, strict=False)):
            made = (out for eqn in jaxpr.eqns[start:end] for out in eqn.outvars)
            place.update((out, (index, number)) for number, out in enumerate(made))
        own: list[dict[str, Any]] = [{} for _ in last]
        for var, (index, path) in owners.items():
            own[index][path] = var
        return _Layers(jaxpr, prefix, owners, tuple(own), tuple(last), place)

    def longest(self) -> tuple[int, int]:
        """First and end of the longest run of layers that are written alike."""
        written = [self._written(index) for index in range(1, len(self.ends) - 1)]
        best, at = (0, 0), 1
        for form, alike in groupby(written):
            count = len([*alike])
            if form is not None and count > best[1] - best[0]:
                best = at, at + count
            at += count
        return best

    def _written(self, index: int) -> tuple[object, ...] | None:
        """A layer as it is but for its number: equal for layers that do the same to what the one
        before gives; None where it reads of other layers."""
        rows: list[object] = []
        for eqn in self._equations(index):
            read = tuple(self._read(atom, index) for atom in eqn.invars)
            if None in read:
                return None
            made = tuple((out.aval, type(out) is jex.DropVar) for out in eqn.outvars)
            params = tuple((key, _setting(value)) for key, value in eqn.params.items())
            rows.append((eqn.primitive, read, params, made, eqn.effects))
        return tuple(rows), tuple(sorted(self.own[index]))

    def _equations(self, index: int) -> Sequence[Any]:
        return self.jaxpr.eqns[self.ends[index - 1] : self.ends[index]]  # type: ignore[no-any-return]

    def _read(self, atom: Any, index: int) -> object:
        if isinstance(atom, jex.Literal):
            return "number", np.asarray(atom.val).tobytes(), atom.aval
        if atom in self.owners:
            owner, path = self.owners[atom]
            return ("own", path, atom.aval) if owner == index else None
        layer, number = self.place.get(atom, (0, 0))
        if not layer:  # what all layers read, and what is made in front of the second
            return "given", atom
        return (index - layer, number) if layer >= index - 1 else None

    def without(self, closed: Any, first: int, end: int) -> tuple[Any, LeftOut | None]:
        """The jaxpr without layers ``first`` to ``end - 1``, where nothing else reads of them than
        the layer behind, and that only what the one before gives."""
        gone = range(first, end)
        given = dict(zip(self._made(end - 1), self._made(first - 1), strict=True))
        behind = [
            eqn.replace(invars=[given.get(v, v) if _is_variable(v) else v for v in eqn.invars])
            if any(v in given for v in _variables(eqn.invars))
            else eqn
            for eqn in self._equations(end)
        ]
        eqns = [
            *self.jaxpr.eqns[: self.ends[first - 1]],
            *behind,
            *self.jaxpr.eqns[self.ends[end] :],
        ]
        read = {v for eqn in eqns for v in _variables(eqn.invars)}
        read.update(_variables(self.jaxpr.outvars))
        known = {v for i in gone for eqn in self._equations(i) for v in _variables(eqn.invars)}
        left = {var for i in gone for var in self.own[i].values()}
        if (
            read & left
            or not left <= known
            or any(self.place.get(v, (0,))[0] in gone for v in read)
        ):
            return closed, None
        out = LeftOut(self.prefix, first, end, frozenset())
        paths = (f"{name}.{path}" for name in out.names for path in self.own[first])
        made = jex.ClosedJaxpr(self.jaxpr.replace(eqns=eqns), closed.consts)
        return made, replace(out, paths=frozenset(paths))

    def _made(self, index: int) -> list[Any]:
        return [out for eqn in self._equations(index) for out in eqn.outvars]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, jex.Literal)


def _variables(atoms: Sequence[Any]) -> Iterator[Any]:
    return filter(_is_variable, atoms)


def _setting(value: Any) -> object:
    """What an equation is set to, of which equal ones are alike: functions and jaxprs that are one
    object; numbers by type, too, and written out, since -0.0 is not 0.0."""
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_setting, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), repr(value) if isinstance(value, float) else value


def put_back(draft: Draft, out: LeftOut) -> Draft | None:
    """A folded draft with the layers that were left out as calls of the block that has the layers
    on either side; None where there is none."""
    before, behind = out.name(out.first - 1), out.name(out.end)
    for place, node in enumerate(draft.nodes):
        instances = node.attrs.get("instances", ()) if node.kind == "scan" else ()
        if before in instances and instances[instances.index(before) + 1 :][:1] == (behind,):
            nodes = [*draft.nodes]
            nodes[place] = _longer(node, instances.index(before) + 1, out.names)
            return None if node.attrs["each"] else replace(draft, nodes=tuple(nodes))
    return None


def _longer(node: Node, place: int, names: tuple[str, ...]) -> Node:
    instances = node.attrs["instances"]
    whole = (*instances[:place], *names, *instances[place:])
    return replace(node, attrs={**node.attrs, "instances": whole, "length": len(whole)})


def fewer_layers(params: Any, out: Sequence[LeftOut]) -> Any:
    """The tree of parameters without these layers, as a loss takes it that goes through its lists
    of them; None where they are no lists."""
    for one in sorted(out, key=lambda one: one.first, reverse=True):  # places of others stay
        params = params and _fewer(params, one.prefix.split(".") if one.prefix else [], one)
    return params


def _fewer(tree: Any, path: Sequence[str], out: LeftOut) -> Any:
    if not path:
        if type(tree) not in (list, tuple):
            return None
        return type(tree)((*tree[: out.first], *tree[out.end :]))
    if type(tree) is dict and path[0] in tree:
        inner = _fewer(tree[path[0]], path[1:], out)
        return None if inner is None else {**tree, path[0]: inner}
    if type(tree) in (list, tuple) and path[0].isdigit():
        inner = _fewer(tree[int(path[0])], path[1:], out)
        at = int(path[0])
        return None if inner is None else type(tree)((*tree[:at], inner, *tree[at + 1 :]))
    return None
