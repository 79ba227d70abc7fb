"""Imports point one way, only some places know a framework, private torch stands in one; and names
say what they hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[2]

# What each folder may import beside itself; the lowest stand first.
ALLOWED = {
    "nouns": set(),
    "rules": {"nouns"},
    "lowering": {"nouns", "rules", "pipeline"},
    "emit": {"nouns", "rules", "pipeline", "lowering"},
    "cost_models": {"nouns", "rules", "pipeline"},
    "files": {"nouns", "cost_models"},
    "searchers": {"nouns"},
    "pipeline": {"nouns"},
    "torch_private": set(),
    "frontends": {"nouns", "rules", "torch_private"},
    "runtime": {
        "nouns",
        "rules",
        "pipeline",
        "lowering",
        "emit",
        "files",
        "frontends",
        "torch_private",
    },
    "planner": {
        "nouns",
        "rules",
        "pipeline",
        "lowering",
        "cost_models",
        "files",
        "searchers",
        "frontends",
    },
    "report": {
        "nouns",
        "rules",
        "lowering",
        "cost_models",
        "searchers",
        "pipeline",
        "planner",
        "files",
        "runtime",
    },
}
ABOVE_ALL = {"", "__main__", "cli", "script"}
FRAMEWORKS = {"torch", "jax", "jaxlib", "transformers"}
MAY_KNOW_FRAMEWORKS = {"frontends", "runtime", "torch_private"}
PRIVATE_TORCH = "autopar/torch_private.py"
SAY_NOTHING = {"found", "told", "said", "wish"}


def sources() -> Iterator[tuple[str, Path]]:
    """(part, file) of every module of the package, each once, the links not followed twice."""
    for top in ("searchers", "cost_models", "runtime"):
        for file in sorted((ROOT / top).rglob("*.py")):
            yield top, file
    for file in sorted((ROOT / "autopar").rglob("*.py")):
        inside = file.relative_to(ROOT / "autopar")
        part = inside.parts[0].removesuffix(".py")
        if not (ROOT / "autopar" / part).is_symlink():
            yield ("" if part == "__init__" else part), file


@cache
def read(file: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Every absolute module name that ``file`` imports, inside functions too, and every name that
    it gives to a variable, an argument, a function or a class."""
    modules: list[tuple[str, int]] = []
    names: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                modules += [(alias.name, node.lineno) for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
                modules += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.append((name, node.lineno))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append((name, node.lineno))
    return modules, names


def imported(file: Path) -> list[tuple[str, int]]:
    return read(file)[0]


def places(modules: Iterable[tuple[str, int]]) -> Iterator[tuple[list[str], int]]:
    yield from ((name.split("."), line) for name, line in modules)


def test_every_part_imports_only_what_lies_below_it() -> None:
    wrong = []
    for part, file in sources():
        for name, line in places(imported(file)):
            if name[0] != "autopar" or part in ABOVE_ALL:
                continue
            assert part in ALLOWED, f"{file}: say in {__file__} what `{part}` may import"
            if name[1] != part and name[1] not in ALLOWED[part]:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {part} imports {'.'.join(name)}")
    assert not wrong, "\n".join(wrong)


def test_only_frontends_and_runtime_know_a_framework() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {'.'.join(name)}"
        for part, file in sources()
        if part not in MAY_KNOW_FRAMEWORKS
        for name, line in places(imported(file))
        if name[0] in FRAMEWORKS
    ]
    assert not wrong, "\n".join(wrong)


def test_private_torch_names_stand_in_one_module() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {'.'.join(name)}"
        for _, file in sources()
        if file.relative_to(ROOT).as_posix() != PRIVATE_TORCH
        for name, line in places(imported(file))
        if name[0] == "torch" and any(piece.startswith("_") for piece in name[1:])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module",
    [
        "autopar",
        "autopar.cli.app",
        "autopar.planner",
        "autopar.cli.unemitted",
        "autopar.cost_models",
        "autopar.searchers",
    ],
)
def test_importing_needs_no_framework(module: str) -> None:
    code = (
        f"import {module}, sys; known = {FRAMEWORKS!r} & set(sys.modules); "
        "assert not known, f'imported {known}'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    import autopar

    assert sorted(autopar.__all__) == ["Workload", "load", "parallelize", "plan", "register_rule"]
    for name in autopar.__all__:
        assert getattr(autopar, name).__doc__, f"autopar.{name} has no docstring"


def test_no_circle_between_files() -> None:
    """Imports inside functions and for types count: a reader follows them too."""
    modules = {_module(file): file for _, file in sources()}
    imports = {
        name: {
            known
            for full, _ in imported(file)
            if (known := full if full in modules else full.rpartition(".")[0]) in modules
            and known != name
        }
        for name, file in modules.items()
    }
    graph = networkx.DiGraph((a, b) for a, names in imports.items() for b in names)
    circles = [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert not circles, "\n".join(" <-> ".join(circle) for circle in circles)


def test_names_say_what_they_hold() -> None:
    """In words of the field, so that nobody reads twice."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for _, file in sources()
        for name, line in read(file)[1]
        if name in SAY_NOTHING
    ]
    assert not wrong, "\n".join(wrong)


def _module(file: Path) -> str:
    inside = file.relative_to(ROOT).with_suffix("").parts
    parts = inside if inside[0] == "autopar" else ("autopar", *inside)
    return ".".join(part for part in parts if part != "__init__")
