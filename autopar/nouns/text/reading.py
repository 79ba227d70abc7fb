"""Reading a graph; `autopar.nouns.text.graph` says how it looks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from autopar.nouns.graph import DTYPE_BYTES, Block, Graph, Op, Role, Source, Tensor, freeze
from autopar.nouns.text.lines import NAME, Cursor, Line, TextError, tree
from autopar.nouns.text.repeats import read_names, unfolded
from autopar.nouns.text.writing import ORIGINAL

ROLES: tuple[Role, ...] = get_args(Role)
SHARDING = re.compile(r"R\b|\w+:[RDPS]\d*(?: \w+:[RDPS]\d*)*")
_ATTR = re.compile(rf'(?:{NAME.pattern}|"(?:[^"\\]|\\.)*") *=')


@dataclass(frozen=True, slots=True)
class Choice:
    """What stands behind an op's types: how it runs, by which rule."""

    line: Line
    strategy: str
    rule: str


@dataclass(frozen=True, slots=True)
class Read:
    """A graph that was read, and what its text says of it (`autopar.nouns.text.writing.Notes`).

    head:      the line that begins it.
    shardings: by tensor.
    choices:   by the op's place.
    below:     lines below values and ops, and behind all ops, with the place of the op.
    blocks:    the same of bodies.
    """

    graph: Graph
    head: Line
    shardings: dict[str, str]
    choices: dict[int, Choice]
    below: list[tuple[int | None, Line]]
    blocks: dict[str, Read]


def read(text: str, head: str, notes: bool = False) -> Read:
    """The graph of a text that begins with ``head``; ``notes``: it may say more than the graph.

    Raises `TextError`.
    """
    top = tree(text)
    if not top:
        raise TextError(f"line 1, column 1: expected {head!r}, there is nothing")
    cursor = Cursor(top[0])
    cursor.expect(head)
    if len(top) > 1:
        top[1].fail("the end of the text, or a line that is indented")
    return _Reader(notes).graph(cursor)


@dataclass(slots=True)
class _Reader:
    """Reads one graph, line by line."""

    notes: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    blocks: dict[str, Block] = field(default_factory=dict)
    shardings: dict[str, str] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    below: list[tuple[int | None, Line]] = field(default_factory=list)
    bodies: dict[str, Read] = field(default_factory=dict)

    def graph(self, cursor: Cursor) -> Read:
        """What stands below the line of ``cursor``, which is before the signature."""
        head = cursor.line
        inputs = cursor.listed(lambda: cursor.name("an input"), "->")
        cursor.expect("->")
        outputs = () if cursor.done else cursor.listed(lambda: cursor.name("an output"))
        cursor.end()
        for line in unfolded(head.below):
            self._line(line)
        for name in (*inputs, *outputs):
            if name not in self.tensors:
                head.fail(f"{name!r} among the values below")
        graph = Graph(self.tensors, tuple(self.ops), inputs, outputs, self.blocks)
        return Read(graph, head, self.shardings, self.choices, self.below, self.bodies)

    def _line(self, line: Line) -> None:
        cursor = Cursor(line)
        first = cursor.name("a line of a graph")
        role = next((role for role in ROLES if role == first), None)
        if cursor.sees("=") or cursor.sees(","):
            self._op(Cursor(line))
        elif first == "block":
            self._block(cursor)
        elif role is not None:
            self._tensor(cursor, cursor.name("a name"), role, ":")
            cursor.end()
            self._below(line.below, None)
        elif self.notes:
            self.below.append((None, line))
        else:
            line.fail(f"an op as in 'y = relu(x) : ...', block, for, or {', '.join(ROLES)}")

    def _block(self, cursor: Cursor) -> None:
        block = cursor.name("the block's name")
        cursor.expect("x")
        count = cursor.number("how often it occurs")
        cursor.expect(",")
        start = cursor.at
        instances = () if cursor.sees(":") else read_names(cursor)
        if len(instances) != count:
            cursor.line.fail(f"{count} module paths, not {len(instances)}", start)
        cursor.expect(":")
        body = _Reader(self.notes).graph(cursor)
        self.blocks[block] = Block(block, body.graph, instances)
        self.bodies[block] = body

    def _op(self, cursor: Cursor) -> None:
        place = len(self.ops)
        outputs = cursor.listed(lambda: cursor.name("a result"))
        cursor.expect("=")
        kind = cursor.name("the kind of an op")
        inputs, attrs = self._arguments(cursor, lambda: self._operand(cursor))
        for i, output in enumerate(outputs):
            self._tensor(cursor, output, None, "," if i else ":")
        if self.notes and cursor.take("by "):
            self.choices[place] = Choice(cursor.line, cursor.until("["), cursor.until("]"))
        source = self._source(cursor) if cursor.take("@") else Source()
        if cursor.take("~"):
            target = cursor.name("the original call")
            args, kwargs = self._arguments(cursor, lambda: freeze(cursor.value("a JSON value")))
            attrs[ORIGINAL] = {"target": target, "args": args, "kwargs": kwargs}
        cursor.end()
        attrs |= self._below(cursor.line.below, place)
        self.ops.append(Op(kind, inputs, outputs, attrs, source))

    def _operand(self, cursor: Cursor) -> str:
        start = cursor.at
        name = cursor.name("an operand")
        if name not in self.tensors:
            cursor.line.fail("a value that is declared or made above", start)
        return name

    def _arguments(self, cursor: Cursor, item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(item, item; name=value, ...)``; what is missing takes the ``;`` with it."""
        cursor.expect("(")
        items = () if cursor.matches(_ATTR) else cursor.listed(item, ")")
        named: dict[str, Any] = {}
        if cursor.take(";") or cursor.matches(_ATTR):
            named.update(cursor.listed(lambda: self._attr(cursor)))
        cursor.expect(")")
        return items, named

    def _attr(self, cursor: Cursor) -> tuple[str, Any]:
        key = cursor.name("the name of an attr")
        cursor.expect("=")
        return key, freeze(cursor.value("a JSON value"))

    def _tensor(self, cursor: Cursor, name: str, role: Role | None, before: str) -> None:
        """The type of ``name``; an op's result (``role`` None) may say its role there."""
        if name in self.tensors:
            cursor.line.fail(f"a new name: {name!r} is taken")
        cursor.expect(before)
        held = self._role(cursor) if role is None else role
        start = cursor.at
        dtype = cursor.name("a type as in float32[64, 512]")
        if dtype not in DTYPE_BYTES:
            cursor.line.fail(f"a dtype of {', '.join(DTYPE_BYTES)}", start)
        sizes = cursor.shape()
        self.tensors[name] = Tensor(name, sizes, dtype, held, cursor.word("grad"))
        if self.notes:
            self.shardings[name] = cursor.matching(SHARDING, "a sharding as in tp:S0, or R")

    def _role(self, cursor: Cursor) -> Role:
        return next((role for role in ROLES if cursor.word(role)), "activation")

    def _source(self, cursor: Cursor) -> Source:
        module = owner = file = ""
        line = 0
        while not cursor.done and not cursor.sees("~"):
            if cursor.take("("):
                owner = cursor.name("the class of the module")
                cursor.expect(")")
                continue
            word = cursor.name("a source as in layers.0 (Layer) model.py:12")
            if cursor.take(":"):
                file, line = word, cursor.number("a line")
            else:
                module = word
        return Source(module, file, line, owner)

    def _below(self, lines: Sequence[Line], place: int | None) -> dict[str, Any]:
        """Attrs that are texts; what else is said there is kept."""
        texts: dict[str, Any] = {}
        for line in lines:
            cursor = Cursor(line)
            key = cursor.name("the name of an attr")
            if place is not None and cursor.take(":") and cursor.done and line.below:
                texts[key] = line.literal()
            elif self.notes:
                self.below.append((place, line))
            else:
                line.fail("a line that is not deeper than the one above, or an attr of several")
        return texts
