"""Branches that skip what has no rows: ``if mask.any(): out[mask] = expert(x[mask])``.

A capture has no values, so it cannot tell whether a mask chooses any row. Such a branch computes
nothing where it chooses none, whether it is taken or not: all that it leaves behind is written to,
or added up in, the rows that the mask chooses. So it is taken, and that this is all it leaves is
checked: in its source (no counter, no list grows) and in what it computed (nothing of it is read
behind it but tensors in which those rows alone are others).
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import fx

from autopar.frontends.pytorch.errors import DataDependentError
from autopar.frontends.pytorch.ir import Node, Value

NodeOf = Callable[[torch.Tensor], fx.Node | None]
"""The node of a trace that holds a tensor now."""


@dataclass(frozen=True, slots=True)
class SomeRows:
    """The question whether there are any rows, of the ``symbol`` that says how many; ``truth``
    where there are some."""

    symbol: Any
    truth: bool

    @staticmethod
    def of(size: torch.SymBool) -> SomeRows | None:
        """None for another question."""
        asked: Any = size.node.expr
        symbols = list(asked.free_symbols)
        if len(symbols) != 1:
            return None
        none, one, many = (asked.subs(symbols[0], n) for n in (0, 1, 1 << 40))
        if not (none.is_Boolean and one == many and one != none):
            return None
        return SomeRows(symbols[0], bool(many))


@dataclass(slots=True)
class Skip:
    """A branch that was taken.

    asked, truth: the question, and what it was taken to be. place: the user's line.
    lines:        of what is skipped elsewhere. frame: that runs it; None when it has ended.
    behind, last: the nodes before the first of it, and the last; ``start``, ``end`` are the places.
    held:         the tensors in names that it assigns, before it, and their nodes.
    left:         nodes of the same names before and behind it.
    """

    asked: fx.Node | SomeRows
    truth: bool
    place: str
    lines: range
    frame: FrameType | None
    graph: fx.Graph
    behind: fx.Node
    held: dict[str, tuple[object, fx.Node | None]]
    last: fx.Node | None = None
    start: int = -1
    end: int = -1
    left: list[tuple[fx.Node | None, fx.Node]] = field(default_factory=list)

    def runs(self, innermost: FrameType | None) -> bool:
        """Whether code below ``innermost`` is still inside."""
        frame = innermost
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None and frame.f_lineno in self.lines

    def close(self, node_of: NodeOf) -> None:
        """Raises `DataDependentError` where it left something other than tensors behind."""
        assert self.frame is not None
        names = self.frame.f_locals
        self.frame, self.last = None, next(iter(reversed(self.graph.nodes)))
        newest = reversed(self.graph.nodes)
        inside = set(itertools.takewhile(lambda node: node is not self.behind, newest))
        for name, (before, was) in self.held.items():
            now = names.get(name)
            if now is None and before is None:
                continue
            node = node_of(now) if isinstance(now, torch.Tensor) else None
            if node is None or (before is not now and node not in inside):
                raise refused(self.place, f"{name!r} is set in it")
            self.left.append((was, node))


def refused(place: str, why: str) -> DataDependentError:
    return DataDependentError(
        f"{place} decides by the value of a tensor whether to run a branch, and {why}: what comes "
        "behind may differ where it does not run. A program is the same for every batch: write in "
        "the branch only to the rows that its mask chooses, or compute both and choose with "
        "torch.where"
    )


# -- in the source ---------------------------------------------------------------------------------


def skipping(path: list[ast.AST]) -> tuple[bool, range, frozenset[str]] | None:
    """For the nodes around a question: the truth with which the branch runs that is skipped else,
    its lines, and the names that it assigns. None where another branch computes instead, or it
    does more than compute tensors."""
    place = len(path) - 1
    while place >= 0 and isinstance(path[place], ast.expr):
        place -= 1
    above = path[place]
    if not isinstance(above, ast.If) or above.orelse:
        return None
    test, flips = above.test, False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, flips = test.operand, not flips
    asked = path[place + 1 :]
    if isinstance(test, ast.BoolOp) or (asked and test not in asked):
        return None
    body, truth = above.body, True
    if [type(s) for s in body] == [ast.Continue]:
        rest = _behind(above, path[place - 1]) if place else None
        if rest is None:
            return None
        body, truth = rest, False
    if not all(map(_is_plain, body)):
        return None
    last = body[-1].end_lineno or body[-1].lineno
    names = frozenset(name for s in body for name in _assigned(s))
    return truth != flips, range(body[0].lineno, last + 1), names


def _behind(branch: ast.If, loop: ast.AST) -> list[ast.stmt] | None:
    """What of a loop comes behind a branch of it."""
    if not isinstance(loop, ast.For | ast.While) or branch not in loop.body:
        return None
    return loop.body[loop.body.index(branch) + 1 :] or None


def _is_plain(statement: ast.stmt) -> bool:
    """An assignment to names and to pieces of tensors, or a call that writes into a tensor."""
    match statement:
        case ast.Assign(targets=targets):
            return all(isinstance(t, ast.Name | ast.Subscript | ast.Tuple) for t in targets)
        case ast.AugAssign(target=ast.Name() | ast.Subscript()):
            return True
        case ast.AnnAssign(target=ast.Name()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr=name))):
            return name.endswith("_") and not name.endswith("__")
        case ast.Expr(value=ast.Constant()):
            return True
    return False


def _assigned(statement: ast.stmt) -> Iterator[str]:
    """Names that it sets, and those of which it sets a piece."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            yield name
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            base: ast.expr = node
            while isinstance(base, ast.Subscript | ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name):
                yield base.id


# -- in what was computed --------------------------------------------------------------------------


class Walk(Protocol):
    """The walk over a trace that is checked: see `autopar.frontends.pytorch.lifter`."""

    nodes: list[Node]
    env: dict[fx.Node, Any]


@dataclass(slots=True)
class Unchanged:
    """What of a walk is as it was where a mask chooses no row.

    masks: by the symbol that says how many rows they choose, with how often each counts.
    alike: the first of equal masks.
    of:    by result, what it is where there are none, and the mask.
    """

    masks: dict[Any, tuple[Value, int]]
    alike: Callable[[Value], Value]

    of: dict[Value, tuple[Value, Value]] = field(default_factory=dict)


class Skips:
    """Checks the branches of one trace while it is walked."""

    def __init__(self, skips: list[Skip], graph: fx.Graph, walk: Walk, rows: Unchanged) -> None:
        self._walk, self._rows = walk, rows
        self._starting: dict[int, list[Skip]] = {}
        self._ending: dict[int, list[Skip]] = {}
        for skip in skips:
            self._starting.setdefault(skip.start, []).append(skip)
            self._ending.setdefault(skip.end, []).append(skip)
        self._graph = list(graph.nodes) if skips else []
        self._places = {node: i for i, node in enumerate(self._graph)}
        self._before: dict[int, dict[fx.Node, Any]] = {}

    def at(self, place: int) -> None:
        """To be called before the node at ``place`` is walked. Raises `DataDependentError`."""
        for skip in self._ending.get(place, ()):
            self._check(skip)
        for skip in self._starting.get(place, ()):
            self._before[id(skip)] = dict(self._walk.env)

    def _check(self, skip: Skip) -> None:
        before, env = self._before.pop(id(skip)), self._walk.env
        makers = {value: node for node in self._walk.nodes for value in node.outputs}
        if isinstance(skip.asked, SomeRows):
            known = self._rows.masks.get(skip.asked.symbol)
            mask = None if known is None else _plain(known[0], makers)
        else:
            mask = _asked_of(env.get(skip.asked), skip.truth, makers)
        if mask is None:
            raise refused(skip.place, "what it asks is not whether a mask chooses any row")
        pairs = [(was, env[n]) for n, was in before.items() if env[n] is not was]
        left: dict[fx.Node, list[Any]] = {}
        for old, new in skip.left:
            left.setdefault(new, []).append(None if old is None else before.get(old))
        for node in self._graph[skip.start : skip.end]:
            if any(self._places[user] >= skip.end for user in node.users):
                pairs += [(was, env.get(node)) for was in left.get(node, [None])]
        for was, now in pairs:
            if not self._is_as_before(was, now, mask, makers):
                raise refused(skip.place, "more of it is read behind it than those rows")

    def _is_as_before(self, was: Any, now: Any, mask: Value, makers: Mapping[Value, Node]) -> bool:
        """Whether ``now`` is ``was`` where the mask chooses no row."""
        if not isinstance(was, Value) or not isinstance(now, Value) or was.shape != now.shape:
            return False
        was, now = _plain(was, makers), _plain(now, makers)
        while now is not was:
            if now not in self._rows.of:
                return False
            base, chosen = self._rows.of[now]
            if not self._is_part(chosen, mask, makers):
                return False
            now = _plain(base, makers)
        return True

    def _is_part(self, chosen: Value, mask: Value, makers: Mapping[Value, Node]) -> bool:
        """Whether the rows that ``chosen`` has are among those of ``mask``."""
        chosen = self._rows.alike(_plain(chosen, makers))
        if chosen is self._rows.alike(mask):
            return True
        made = makers.get(chosen)
        both = made is not None and made.kind == "and"
        return both and any(self._is_part(v, mask, makers) for v in makers[chosen].inputs)


def _plain(value: Value, makers: Mapping[Value, Node]) -> Value:
    """What ``value`` is another shape of."""
    while (made := makers.get(value)) is not None and made.kind in ("reshape", "identity"):
        value = made.inputs[0]
    return value


def _asked_of(asked: Any, truth: bool, makers: Mapping[Value, Node]) -> Value | None:
    """The mask of which it was asked whether it chooses any row."""
    made = makers.get(_plain(asked, makers)) if isinstance(asked, Value) else None
    if made is None or not isinstance(asked, Value):
        return None
    if made.kind == "not":
        return _asked_of(made.inputs[0], not truth, makers)
    if made.kind == "any" and made.output.shape == ():
        return _mask_of(made.inputs[0], makers) if truth else None
    compared: dict[Any, bool] = {
        ("gt", 0): True,
        ("ne", 0): True,
        ("ge", 1): True,
        ("eq", 0): False,
    }
    if compared.get((made.kind, made.attrs.get("other"))) is not truth:
        return None
    total = makers.get(_plain(made.inputs[0], makers))
    if total is None or total.kind != "sum" or total.output.shape != ():
        return None
    return _mask_of(total.inputs[0], makers)


def _mask_of(value: Value, makers: Mapping[Value, Node]) -> Value | None:
    value = _plain(value, makers)
    made = makers.get(value)
    if value.dtype != "bool" and made is not None and made.kind == "cast":
        value = _plain(made.inputs[0], makers)
    return value if value.dtype == "bool" else None
