"""Branches that only check values: ``if labels.max() >= n: raise``, ``assert (x > 0).all()``.

A capture has no values, so it cannot take a branch by one. Where one side does nothing but raise,
the program is that of the other side: what a batch that is right computes. Which side that is
stands in the source, at the place where the truth of a tensor is asked.
"""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterator
from functools import cache
from types import FrameType

from autopar.frontends.pytorch.build import is_internal

_SAID = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Pass)
"""Statements that may stand before a raise: what they do is over when it raises."""
_OUTSIDE = ("frontends/pytorch/trace.py", "frontends/pytorch/noting.py")
"""Files of ours that call the user's code."""
_CHECKS = ("_check", "_check_value", "_check_index", "_check_type", "_check_tensor_all")


def passing(frame: FrameType) -> bool | None:
    """What the truth of a tensor has to be, asked at ``frame``, so that nothing raises there.

    None where the place is no such check: both sides compute, the source is not to be had, or a
    ``try`` around it may catch what is raised and go on.
    """
    tree = _tree(frame.f_code.co_filename)
    code = list(dis.get_instructions(frame.f_code))
    here = next(
        (i for i, instruction in enumerate(code) if instruction.offset == frame.f_lasti), None
    )
    span = None if here is None else _span(code[here])
    if tree is None or here is None or span is None:
        return None
    path = _path(tree, span)
    asked = _at_jump(path, code, here) if "POP_JUMP" in code[here].opname else _wanted(path)
    return None if asked is None or any(map(_is_caught, _callers(frame))) else asked


def leads_inside(frame: FrameType, path: list[ast.AST]) -> bool | None:
    """The truth of what is asked at ``frame`` with which the branch around it runs at once, as one
    of several questions: of ``a or b`` each that is true. None where none does: ``a and b``."""
    code = list(dis.get_instructions(frame.f_code))
    here = next((i for i, c in enumerate(code) if c.offset == frame.f_lasti), None)
    statement = next((n for n in reversed(path) if isinstance(n, ast.stmt)), None)
    if here is None or "POP_JUMP" not in code[here].opname or not isinstance(statement, ast.If):
        return None
    for truth, end in _ends(code, here).items():
        span = _span(end)
        if span is not None and any(_covers(s, span) for s in statement.body):
            return truth
    return None


def path_of(frame: FrameType) -> list[ast.AST] | None:
    """The nodes of the source around the call that ``frame`` makes, from the outermost; None where
    it is not to be had, or a ``try`` around it may catch what is raised."""
    tree = _tree(frame.f_code.co_filename)
    code = dis.get_instructions(frame.f_code)
    here = next((instruction for instruction in code if instruction.offset == frame.f_lasti), None)
    span = None if here is None else _span(here)
    if tree is None or span is None or any(map(_is_caught, _callers(frame))):
        return None
    return _path(tree, span)


_COMPARED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


class Compared:
    """A number of a tensor's that is compared once and else unseen: each comparison is ``truth``.

    What a capture has for ``lengths.max().item()`` in ``assert lengths.max().item() <= n``.
    """

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def _answer(self, other: object) -> bool:
        return self._truth

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _answer
    __hash__ = None  # type: ignore[assignment]


def passing_number(frame: FrameType) -> bool | Compared | None:
    """What ``tensor.item()``, called at ``frame``, may give where a check asks for its truth or
    compares it once; None elsewhere. See `passing`."""
    path = path_of(frame)
    if path is None or len(path) < 2 or not isinstance(path[-1], ast.Call):
        return None
    *path, call = path
    above = path[-1]
    if not isinstance(above, ast.Compare):
        return _wanted([*path, call])
    plain = len(above.ops) == 1 and isinstance(above.ops[0], _COMPARED)
    asked = _wanted(path) if plain and call in (above.left, *above.comparators) else None
    return None if asked is None else Compared(asked)


def _at_jump(path: list[ast.AST], code: list[dis.Instruction], here: int) -> bool | None:
    """The truth that leads away from the side that raises, or to the next part of the test."""
    statement = next((n for n in reversed(path) if isinstance(n, ast.stmt)), None)
    if isinstance(statement, ast.Assert):
        raising: list[ast.stmt] = []
    elif isinstance(statement, ast.If) and (side := _computing_side(statement)) is not None:
        raising = statement.orelse if side else statement.body
    else:
        return None
    ends = _ends(code, here)

    def raises(instruction: dis.Instruction) -> bool:
        span = _span(instruction)
        inside = span is not None and any(_covers(s, span) for s in raising)
        return inside or instruction.opname == "LOAD_ASSERTION_ERROR"

    def tests(instruction: dis.Instruction) -> bool:
        span = _span(instruction)
        return span is not None and _covers(statement.test, span)

    for truth, end in ends.items():
        if raises(end):
            return not truth
    left = [truth for truth, end in ends.items() if not tests(end)]
    return left[0] if len(left) == 1 else None


def _ends(code: list[dis.Instruction], here: int) -> dict[bool, dis.Instruction]:
    """By the truth of what is asked, where the jump at place ``here`` leads."""
    jump = code[here]
    if_true = "IF_TRUE" in jump.opname
    end = next(i for i in code if i.offset == jump.argval)
    return {if_true: end, not if_true: code[here + 1]}


@cache
def _tree(file: str) -> ast.Module | None:
    text = "".join(linecache.getlines(file))
    try:
        return ast.parse(text) if text else None
    except SyntaxError:
        return None


Span = tuple[int, int, int, int]  # first line and column, last line and column


def _span(instruction: dis.Instruction) -> Span | None:
    """Where an instruction stands in the source."""
    at = instruction.positions
    if at is None or None in (at.lineno, at.col_offset, at.end_lineno, at.end_col_offset):
        return None
    return at.lineno, at.col_offset, at.end_lineno, at.end_col_offset  # type: ignore[return-value]


def _path(tree: ast.AST, span: Span) -> list[ast.AST]:
    """The nodes around ``span``, from the outermost to the innermost."""
    path: list[ast.AST] = [tree]
    while True:
        inner = next((c for c in _children(path[-1]) if _covers(c, span)), None)
        if inner is None:
            return path
        path.append(inner)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if hasattr(child, "lineno"):
            yield child
        else:  # arguments, comprehensions: nodes without a place of their own
            yield from _children(child)


def _covers(node: ast.AST, span: Span) -> bool:
    line, column, end, end_column = span
    first = (node.lineno, node.col_offset)  # type: ignore[attr-defined]
    last = (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    return first <= (line, column) and (end, end_column) <= last


def _wanted(path: list[ast.AST]) -> bool | None:
    """Goes up from the innermost node to the check that it is the truth of."""
    flips = isinstance(path[-1], ast.UnaryOp) and isinstance(path[-1].op, ast.Not)
    leaf = path[-1]
    for above in reversed(path[:-1]):
        if isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not):
            flips = not flips
        elif isinstance(above, ast.Assert):
            return None if leaf is not above.test else not flips
        elif isinstance(above, ast.If):
            side = _computing_side(above) if leaf is above.test else None
            return None if side is None else side != flips
        elif isinstance(above, ast.Call):
            name = getattr(above.func, "attr", getattr(above.func, "id", ""))
            if name in _CHECKS and above.args and leaf is above.args[0]:
                return not flips
            if name != "bool":
                return None
        elif not isinstance(above, ast.BoolOp):
            return None
        leaf = above
    return None


def _computing_side(branch: ast.If) -> bool | None:
    """The truth of the test with which ``branch`` does not raise; None where neither side only
    raises."""
    if _only_raises(branch.body):
        return False
    return True if branch.orelse and _only_raises(branch.orelse) else None


def _only_raises(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Raise) and all(isinstance(s, _SAID) for s in body[:-1])


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """``frame`` and those of the user's code that called it."""
    caller: FrameType | None = frame
    while caller is not None:
        file = caller.f_code.co_filename
        if file.endswith(_OUTSIDE):
            return
        if caller is frame or not is_internal(file):
            yield caller
        caller = caller.f_back


def _is_caught(frame: FrameType) -> bool:
    """Whether the line that runs is inside a ``try`` with handlers."""
    tree = _tree(frame.f_code.co_filename)
    line = frame.f_lineno
    return tree is not None and any(
        node.handlers and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        for node in _tries(frame.f_code.co_filename)
    )


@cache
def _tries(file: str) -> list[ast.Try]:
    tree = _tree(file)
    return [] if tree is None else [n for n in ast.walk(tree) if isinstance(n, ast.Try)]
