"""What the model's own source calls a value: the target of the assignment that its op came from.

``q, k, v = self.qkv(x).chunk(3, -1)`` names the three results of the split; ``y = y.transpose(1,
2)`` the transposed value. Lines without an assignment name nothing, nor do files that are gone.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autopar.emit.names import identifier
from autopar.lowering.lowered import Lowered
from autopar.nouns.graph import Op

# Letters of a name that is taken over: in the stream, which most lines read, and beside it.
LONGEST, LONGEST_BESIDE = 8, 20
_LAYERS = frozenset("linear linear_t conv embedding block select slice sum mean".split())
_NOTHING = frozenset("output outputs result results res ret tmp temp".split())  # names nothing
_STREAM = frozenset({"hidden_states", "hidden_state", "inputs_embeds"})


@dataclass(frozen=True, slots=True, eq=False)
class _Assignment:
    """``targets`` are "" where they are no plain names; ``parts`` is what each is assigned.

    Where one expression gives them all, it is the one part.
    """

    first: int
    last: int
    targets: tuple[str, ...]
    parts: tuple[ast.expr, ...]


def source_names(lowered: Lowered) -> dict[str, str]:
    """Name by tensor, of what a statement assigns; a value on the way to it has none of its own."""
    readers = lowered.graph.consumers()
    executed = _executions(lowered)
    names: dict[str, str] = {}
    ahead: dict[str, int] = {}  # by tensor, the executions that it leads to, a bit for each
    for op in reversed(lowered.graph.ops):
        own = executed[op.name]
        for result, name in enumerate(op.outputs):
            ahead[name] = 0
            final = own is not None
            named = own is not None and len(own.statement.targets) == len(op.outputs) > 1
            for reader, _ in readers[name]:
                other = executed[reader.name]
                leads = 0 if other is None else 1 << other.number
                for after in reader.outputs:
                    leads |= ahead.get(after, 0)
                ahead[name] |= leads
                if own is not None and leads >> own.number & 1:
                    passed = other == own and _goes_on(reader, lowered)
                    final = final and passed and bool(names.get(reader.name))
            if own is not None and (final or named):
                stream = lowered.graph.tensors[name].differentiable
                longest = LONGEST if stream else LONGEST_BESIDE
                names[name] = _short(_target(own.statement, op, result), longest)
    return names


def statement_names(lowered: Lowered) -> dict[str, str]:
    """Name by tensor, of the one thing that its statement assigns, be it a value on the way."""
    executed = _executions(lowered)
    return {
        name: _short(execution.statement.targets[0], LONGEST)
        for op in lowered.graph.ops
        if (execution := executed[op.name]) is not None and len(execution.statement.targets) == 1
        for name in op.outputs
    }


@dataclass(frozen=True, slots=True)
class _Execution:
    """A statement that ran, once; ``number`` tells the times apart."""

    statement: _Assignment
    number: int


def _executions(lowered: Lowered) -> dict[str, _Execution | None]:
    """For each op what it is part of; what a function returns is part of what it began in."""
    executions: dict[str, _Execution | None] = {}
    now: dict[_Assignment, _Execution] = {}
    # By execution, kind and last part of the module's path, the path: another is the next layer's.
    seen: dict[tuple[int, str, str], str] = {}
    number = 0
    for op in lowered.graph.ops:
        statement = _statement(op)
        if statement is None:
            begun = next((executions[n] for n in op.inputs if n in executions), None)
            inherits = begun and len(begun.statement.targets) == 1 and _goes_on(op, lowered)
            executions[op.name] = begun if inherits else None
            continue
        path = op.source.module
        last = path.rpartition(".")[2]
        current = now.get(statement)
        if current is None or seen.get((current.number, op.kind, last), path) != path:
            current = now[statement] = _Execution(statement, number)
            number += 1
        seen[current.number, op.kind, last] = path
        executions[op.name] = current
    return executions


def _goes_on(reader: Op, lowered: Lowered) -> bool:
    """Whether a result is still the operand, changed: an activation, a view, a bias added."""
    roles = [lowered.graph.tensors[name].role for name in reader.inputs]
    given = [role for role in roles if role not in ("parameter", "buffer")]
    return len(given) == 1 and reader.kind not in _LAYERS


def _statement(op: Op) -> _Assignment | None:
    """The innermost assignment that an op's line belongs to; of several on a line, its own."""
    file, line = op.source.file, op.source.line
    try:
        assignments = _around(file, Path(file).stat().st_mtime_ns, line)
    except (OSError, SyntaxError, ValueError):
        return None
    if len(assignments) > 1:
        assignments = tuple(a for a in assignments if any(_mentions(part, op) for part in a.parts))
    return assignments[0] if len(assignments) == 1 else None


@lru_cache(maxsize=4096)
def _around(file: str, changed: int, line: int) -> tuple[_Assignment, ...]:
    """The shortest assignments that ``line`` belongs to."""
    around = [a for a in _assignments(file, changed) if a.first <= line <= a.last]
    length = min((a.last - a.first for a in around), default=0)
    return tuple(a for a in around if a.last - a.first == length)


def _short(name: str, longest: int) -> str:
    if name in _STREAM:
        return "x"
    meaningful = name.strip("_") and name not in _NOTHING
    return identifier(name) if meaningful and len(name) <= longest else ""


def _target(assignment: _Assignment, op: Op, result: int) -> str:
    if len(assignment.targets) == len(op.outputs):
        return assignment.targets[result]
    if len(op.outputs) > 1:
        return ""
    if len(assignment.parts) != len(assignment.targets):
        return ""
    named = zip(assignment.targets, assignment.parts, strict=True)
    fitting = [target for target, part in named if _mentions(part, op)]
    return fitting[0] if len(fitting) == 1 else ""


def _mentions(part: ast.expr, op: Op) -> bool:
    """Whether an expression speaks of an op: its kind, its module, the index that it selects."""
    words = {op.kind, op.source.module.rpartition(".")[2]}
    for node in ast.walk(part):
        if isinstance(node, ast.Attribute) and node.attr in words:
            return True
        if isinstance(node, ast.Subscript) and op.kind == "select":
            indices = [n.value for n in ast.walk(node.slice) if isinstance(n, ast.Constant)]
            return op.attrs["index"] in indices
    return False


@lru_cache(maxsize=64)
def _assignments(file: str, changed: int) -> tuple[_Assignment, ...]:
    """``changed``: when; a file that was written again is read again."""
    parsed = ast.parse(Path(file).read_text(encoding="utf-8"))
    assignments = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            target = node.target
        else:
            continue
        value = node.value
        if any(isinstance(inner, ast.Lambda) for inner in ast.walk(node)):
            continue  # what it computes is for later, and for something else
        targets, parts = [target], [value] if value else []
        if isinstance(target, ast.Tuple | ast.List):
            targets = target.elts
            if isinstance(value, ast.Tuple | ast.List):
                parts = value.elts
        names = tuple(t.id if isinstance(t, ast.Name) else "" for t in targets)
        last = node.end_lineno or node.lineno
        assignments.append(_Assignment(node.lineno, last, names, tuple(parts)))
    return tuple(assignments)
