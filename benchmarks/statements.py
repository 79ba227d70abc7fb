"""How much product code there is, by folder, and beside another commit.

    python -m benchmarks.statements [--against COMMIT] [--json]

A statement is one of Python's, wherever it stands. Docstrings, comments and data are not counted:
data are assignments at the top of a module of what is written out there. Tests, benchmarks and
examples are no product code.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show

PRODUCT = ("autopar", "cost_models", "runtime", "searchers")
LONGEST_FILE_LINES, LONGEST_FUNCTION_LINES = 350, 60
FEWER = 2000
"""Statements that there are to be fewer of than at the commit that is compared with."""


def statements(text: str) -> int:
    """Of a module, without docstrings and data."""
    tree = ast.parse(text)
    every = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    return every - sum(map(_is_text, ast.walk(tree))) - sum(map(_is_data, tree.body))


def _is_text(node: ast.AST) -> bool:
    plain = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return plain and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def _is_data(node: ast.stmt) -> bool:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return False
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True


def longest_function(text: str) -> tuple[int, str]:
    """Lines and name of the longest function of a module."""
    functions = [
        ((node.end_lineno or 0) - node.lineno + 1, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return max(functions, default=(0, ""))


def here() -> Iterator[tuple[str, str]]:
    """(path, text) of product modules, by the files that git knows or could."""
    for name in _git("ls-files", "-co", "--exclude-standard", *PRODUCT):
        path = Path(name)
        if path.suffix == ".py" and path.is_file() and not path.is_symlink():
            yield name, path.read_text()


def of_commit(commit: str) -> Iterator[tuple[str, str]]:
    """The same of a commit."""
    for name in _git("ls-tree", "-r", "--name-only", commit, *PRODUCT):
        if name.endswith(".py"):
            yield name, "\n".join(_git("show", f"{commit}:{name}"))


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _folder(name: str) -> str:
    parts = Path(name).parts[:-1]
    return "/".join(parts[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", default="", help="a commit to compare with")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    own = dict(here())
    now: Counter[str] = Counter()
    for name, text in own.items():
        now[_folder(name)] += statements(text)
    before: Counter[str] = Counter()
    for name, text in of_commit(given.against) if given.against else ():
        before[_folder(name)] += statements(text)
    rows: list[dict[str, Any]] = [
        {"folder": folder, "statements": now[folder]}
        | ({"before": before[folder]} if given.against else {})
        for folder in sorted(now | before)
    ]
    total = {"folder": "all", "statements": now.total()}
    rows.append(total | ({"before": before.total()} if given.against else {}))
    lines = max(len(text.splitlines()) for text in own.values())
    function = max(longest_function(text) for text in own.values())
    targets = [
        Target("lines of the longest file", lines, LONGEST_FILE_LINES),
        Target(
            f"lines of the longest function ({function[1]})", function[0], LONGEST_FUNCTION_LINES
        ),
    ]
    if given.against:
        most = before.total() - FEWER
        targets.append(Target("statements", now.total(), most))
    show(rows, targets, given.json)


if __name__ == "__main__":
    main()
