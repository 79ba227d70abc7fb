"""Reads the text of what is lowered back: what it says is then all of it.

A rule is not read from its text, nor what it runs: the rule is the one that is registered, from
which the same must follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from autopar.lowering.lowered import Lowered, LoweredOp, LoweredTensor, Operand
from autopar.lowering.pieces import with_pieces
from autopar.lowering.text import as_shared, runs
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph, Op
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Placement, Sharding
from autopar.nouns.text.lines import Cursor, Line, name
from autopar.nouns.text.reading import SHARDING, Choice, Read, read
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind
from autopar.rules.resharding import Step
from autopar.rules.strategies import Strategy

_PLACEMENT = re.compile(r"[RDP]|S\d+")
_WORD = re.compile(r"\w+")


def from_text(text: str) -> Lowered:
    """The inverse of `autopar.lowering.text.to_text`.

    Raises `TextError`, also where a rule is another one by now.
    """
    parsed = read(text, "lowered", notes=True)
    first = {line.text.split(" ")[0]: line for _, line in parsed.below[:2]}
    pieces: dict[str, int] = {}
    for _, line in parsed.below:
        if line.text.startswith("pieces "):
            cursor = Cursor(line, len("pieces "))
            of = cursor.name("a value")
            pieces[of] = cursor.number("how many")
    if "on" not in first:
        parsed.head.fail("'on' and a mesh in the line below", len(parsed.head.text))
    block = None
    if "in" in first:
        cursor = Cursor(first["in"], len("in "))
        block = cursor.name("a block")
        cursor.end()
    return with_pieces(_lowered(parsed, _mesh(first["on"]), block), pieces)


def _mesh(line: Line) -> Mesh:
    try:
        return Mesh.parse(line.text.removeprefix("on "))
    except ValueError:
        line.fail("a mesh as in dp_shard=2 x tp=2, or 1", len("on "))


def _lowered(parsed: Read, mesh: Mesh, block: str | None) -> Lowered:
    """``parsed`` with what is said of it."""
    graph = parsed.graph
    blocks = {n: _lowered(body, mesh, n) for n, body in parsed.blocks.items()}
    notes = _Notes(parsed, mesh)
    for place, line in parsed.below:
        notes.line(Cursor(line), place)
    tensors = {
        n: LoweredTensor(t, notes.produced(n), *notes.shared.get(n, (notes.produced(n), ())))
        for n, t in graph.tensors.items()
    }
    ops = []
    for place, op in enumerate(graph.ops):
        operands = as_shared(op, graph, tensors, blocks)
        for i, operand in notes.operands.get(place, {}).items():
            operands[i] = operand
        bound, strategy = _choice(op, graph, parsed.choices.get(place), parsed.head)
        results = tuple(tensors[n].produced for n in op.outputs)
        ops.append(LoweredOp(op, bound, strategy, tuple(operands), results))
        notes.check_runs(place, ops[-1])
    return Lowered(graph, mesh, block, tensors, tuple(ops), tuple(notes.outputs), blocks)


def _choice(
    op: Op, graph: Graph, choice: Choice | None, head: Line
) -> tuple[BoundRule | None, Strategy]:
    if op.kind == "block":
        return None, Strategy()
    if choice is None:
        head.fail(f"'by strategy [rule]' behind the type of every op, also of {op.name}")
    try:
        bound = bind(op, graph.tensors)
    except UserError as error:
        choice.line.fail(f"an op whose rule is known ({error})")
    if str(bound) != choice.rule:
        at = choice.line.text.find(choice.rule)
        choice.line.fail(f"the rule of {op.kind}, which is {bound}", at)
    try:
        return bound, Strategy.parse(choice.strategy)
    except ValueError:
        at = choice.line.text.find(choice.strategy)
        choice.line.fail("a strategy as in tp:n, or whole", at)


@dataclass(slots=True)
class _Notes:
    """What the lines below values and ops say.

    shared:   of a value, and the steps to there.
    operands: by the op's place and their own.
    runs:     by the op's place.
    """

    parsed: Read
    mesh: Mesh
    shared: dict[str, tuple[Sharding, tuple[Step, ...]]] = field(default_factory=dict)
    operands: dict[int, dict[int, Operand]] = field(default_factory=dict)
    outputs: list[Operand] = field(default_factory=list)
    runs: dict[int, list[Line]] = field(default_factory=dict)

    def produced(self, tensor: str) -> Sharding:
        return Sharding.parse(self.parsed.shardings[tensor])

    def line(self, cursor: Cursor, place: int | None) -> None:
        verb = cursor.name("shares, reads or returns")
        if verb in ("on", "in", "pieces") and place is None:
            return
        if verb == "runs" and place is not None:
            self.runs.setdefault(place, []).append(cursor.line)
            return
        if verb == "shares":
            tensor = self._value(cursor)
            cursor.expect("as")
            self.shared[tensor] = (self._sharding(cursor), self._steps(cursor))
        elif verb == "returns" and place is None:
            self.outputs.append(self._wanted(cursor, self._value(cursor)))
        elif verb == "reads" and place is not None:
            inputs = self.parsed.graph.ops[place].inputs
            tensor = self._value(cursor)
            if tensor not in inputs:
                cursor.line.fail(f"an operand of the op above, {', '.join(map(name, inputs))}")
            i = cursor.number("an operand's place") if cursor.take("#") else inputs.index(tensor)
            self.operands.setdefault(place, {})[i] = self._wanted(cursor, tensor)
        else:
            cursor.line.fail("shares, or reads or runs below an op, or returns at the end")
        cursor.end()

    def check_runs(self, place: int, op: LoweredOp) -> None:
        """Whether what is inside of ``op`` is what the text says."""
        expected, priced = runs(op, self.mesh), self.runs.get(place, [])
        for i, line in enumerate(priced):
            if line.text not in expected[i : i + 1]:
                line.fail(f"{expected[i]!r}" if i < len(expected) else "no more of what it runs")
        if len(priced) < len(expected):
            line = self.parsed.choices[place].line
            line.fail(f"{expected[len(priced)]!r} below", len(line.text))

    def _value(self, cursor: Cursor) -> str:
        start = cursor.at
        tensor = cursor.name("a value")
        if tensor not in self.parsed.graph.tensors:
            cursor.line.fail("a value of this graph", start)
        return tensor

    def _wanted(self, cursor: Cursor, tensor: str) -> Operand:
        cursor.expect("as")
        sharding, grad = self._sharding(cursor), cursor.word("grad")
        return Operand(tensor, sharding, self._steps(cursor), grad)

    def _sharding(self, cursor: Cursor) -> Sharding:
        return Sharding.parse(cursor.matching(SHARDING, "a sharding as in tp:S0, or R"))

    def _steps(self, cursor: Cursor) -> tuple[Step, ...]:
        return cursor.listed(lambda: self._step(cursor)) if cursor.take(":") else ()

    def _step(self, cursor: Cursor) -> Step:
        start = cursor.at
        axis = cursor.name("an axis")
        if axis not in self.mesh.axes:
            cursor.line.fail(f"an axis of {self.mesh}", start)
        source = self._placement(cursor)
        cursor.expect("->")
        target = self._placement(cursor)
        forward = cursor.matching(_WORD, "what moves forward, or none")
        cursor.expect("/")
        backward = cursor.matching(_WORD, "what moves backward, or none")
        return Step(axis, source, target, forward, backward, cursor.shape())

    def _placement(self, cursor: Cursor) -> Placement:
        return Placement.parse(cursor.matching(_PLACEMENT, "one of R, D, P, S<dim>"))
