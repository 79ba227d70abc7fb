"""Which branch of a source may be skipped as a whole, and the names that it leaves behind.

Such a branch computes tensors and no more: no counter and no list grows in it (`skipped`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence


def skipping(
    path: list[ast.AST], inside: bool | None = None
) -> tuple[bool, range, frozenset[str]] | None:
    """For the nodes around a question: the truth with which the branch runs that is skipped else,
    its lines, and the names that it assigns. None where another branch computes instead, or it
    does more than compute tensors.

    inside: the truth that leads into the branch at once, of a question that is one of several.
    """
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
    if not isinstance(test, ast.BoolOp):
        inside = not flips
        if asked and test not in asked:
            return None
    elif inside is None:
        return None
    body = above.body
    if [type(s) for s in body] == [ast.Continue]:
        rest = _behind(above, path[place - 1]) if place else None
        if rest is None or isinstance(test, ast.BoolOp):
            return None
        body, inside = rest, flips
    known = left_by(body, path)
    return None if known is None else (inside, *known)


def left_by_rounds(loop: ast.For, path: Sequence[ast.AST]) -> tuple[range, frozenset[str]] | None:
    """`left_by` of a loop's body, which may set its variable and go on to the next round."""
    left = left_by(loop.body, path, [s for s in loop.body if not _goes_on(s)])
    function = next((n for n in reversed(path) if isinstance(n, ast.FunctionDef)), None)
    if left is None or function is None or not isinstance(loop.target, ast.Name):
        return left
    lines, names = left
    own = loop.target.id
    read = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == own]
    inside = all(n.lineno in lines for n in read if isinstance(n.ctx, ast.Load))
    return lines, names - {own} if inside else names


def _goes_on(statement: ast.stmt) -> bool:
    match statement:
        case ast.If(body=[ast.Continue()], orelse=[]):
            return True
    return False


def left_by(
    body: Sequence[ast.stmt], path: Sequence[ast.AST], computing: Sequence[ast.stmt] | None = None
) -> tuple[range, frozenset[str]] | None:
    """The lines of a body, and the names that it assigns which code behind it may read; ``path``
    has the function that it is of. None where it does more than compute tensors."""
    if not all(map(_is_plain, body if computing is None else computing)):
        return None
    last = body[-1].end_lineno or body[-1].lineno
    lines = range(body[0].lineno, last + 1)
    names = frozenset(name for s in body for name in _assigned(s))
    function = next((n for n in reversed(path) if isinstance(n, ast.FunctionDef)), None)
    if function is not None:
        names = frozenset(n for n in names if not _stays_inside(n, body, lines, function))
    return lines, names


def _stays_inside(
    name: str, body: Sequence[ast.stmt], lines: range, function: ast.FunctionDef
) -> bool:
    """Whether every reader of ``name`` stands in the body, behind where that sets it."""
    if any(
        isinstance(n, ast.Global | ast.Nonlocal) and name in n.names for n in ast.walk(function)
    ):
        return False
    read = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
    if any(isinstance(n.ctx, ast.Load) and n.lineno not in lines for n in read):
        return False
    first = next(s for s in body if any(n.lineno in _lines(s) for n in read))
    match first:
        case ast.Assign(targets=targets, value=value):
            stored = [n for t in targets for n in _plain_names(t)]
            inside = [n for n in ast.walk(value) if isinstance(n, ast.Name)]
            return name in stored and all(n.id != name for n in inside)
    return False


def _lines(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def _plain_names(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(id=name):
            yield name
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _plain_names(part)


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
