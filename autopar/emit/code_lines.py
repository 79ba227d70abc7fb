"""The lines of a program that say something, and what two programs have in common."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator


def matcher(a: list[tuple[int, str]], b: list[tuple[int, str]]) -> difflib.SequenceMatcher[str]:
    """What two texts have in common, from `code_lines` of each."""
    left, right = ([text for _, text in lines] for lines in (a, b))
    return difflib.SequenceMatcher(None, left, right, autojunk=False)


def code_lines(text: str, python: bool = True) -> list[tuple[int, str]]:
    """(number, text) of every line but comments and docstrings, without the comment beside it.
    A text that is no ``python`` has comments alone."""
    spans = _docstrings(text) if python else ()
    docstrings = {line for start, end in spans for line in range(start, end + 1)}
    lines = [(n, line.partition("  # ")[0].rstrip()) for n, line in enumerate(text.splitlines(), 1)]
    return [
        (n, line)
        for n, line in lines
        if line and n not in docstrings and not line.lstrip().startswith("#")
    ]


def _docstrings(text: str) -> Iterator[tuple[int, int]]:
    """First and last line of each string that is a statement of its own."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, node.end_lineno or node.lineno
