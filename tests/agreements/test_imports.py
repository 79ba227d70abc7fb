"""Imports point one way, only some places know a framework, private torch stands in one; and names
say what they hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import networkx

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
    "collectives": {"nouns"},
    "torch_private": set(),
    "frontends": {"nouns", "rules", "files", "torch_private"},
    "runtime": {
        "nouns",
        "rules",
        "pipeline",
        "collectives",
        "lowering",
        "emit",
        "files",
        "frontends",
        "torch_private",
    },
    "pricing": {"nouns", "rules", "pipeline", "lowering", "cost_models"},
    "planner": {
        "nouns",
        "rules",
        "pipeline",
        "lowering",
        "cost_models",
        "pricing",
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
        "pricing",
        "planner",
        "files",
        "runtime",
    },
}
ABOVE_ALL = {"", "__main__", "cli", "script"}
FRAMEWORKS = {"torch", "jax", "jaxlib", "transformers"}
MAY_KNOW_FRAMEWORKS = {"frontends", "runtime", "torch_private"}
# Names that begin with an underscore, stand in files that know torch, and are not torch's.
NOT_TORCH = {
    "sys._getframe",  # Python's: whose line is running
    "os._exit",  # Python's: a process that must not clean up behind another
    "kind._fields",  # of named tuples
    "module._apply_gate",  # of experts of transformers
}
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


class Read(NamedTuple):
    """What tests ask of one file, with lines.

    modules: every absolute module name that it imports, inside functions too.
    names:   every name that it gives to a variable, an argument, a function or a class.
    texts:   every constant that is a text.
    foreign: see `foreign_attributes`.
    """

    modules: list[tuple[str, int]]
    names: list[tuple[str, int]]
    texts: list[tuple[str, int]]
    foreign: list[tuple[str, int]]


@cache
def read(file: Path) -> Read:
    """Parsed once for all tests; what stays is little, the syntax itself is many objects."""
    modules: list[tuple[str, int]] = []
    names: list[tuple[str, int]] = []
    texts: list[tuple[str, int]] = []
    nodes = list(ast.walk(ast.parse(file.read_text())))
    for node in nodes:
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
            case ast.Constant(value=str(text)):
                texts.append((text, node.lineno))
    return Read(modules, names, texts, list(foreign_attributes(nodes)))


def imported(file: Path) -> list[tuple[str, int]]:
    return read(file).modules


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


def test_private_torch_names_stand_in_one_folder() -> None:
    """Modules, and attributes: what a file has not defined for objects of its own is another's."""
    wrong, others = [], set()
    for part, file in sources():
        if part == "torch_private":
            continue
        for name, line in places(imported(file)):
            if name[0] == "torch" and any(piece.startswith("_") for piece in name[1:]):
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {'.'.join(name)}")
        for name_of, line in read(file).foreign if part in MAY_KNOW_FRAMEWORKS else ():
            others.add(name_of)
            if name_of not in NOT_TORCH:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {name_of}")
    assert not wrong, "\n".join(wrong)
    assert others == NOT_TORCH, f"no longer there: {sorted(NOT_TORCH - others)}"


def foreign_attributes(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """(``x._name``, line) of every attribute with one underscore, asked by its name as text too,
    that no class of a file has. An op's own name is asked of `torch.ops` like any other."""
    own: set[str] = set()
    for node in nodes:
        match node:
            case ast.ClassDef(body=body):
                for line in body:
                    match line:
                        case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                            own.add(name)
                        case ast.Assign(targets=targets):
                            own.update(t.id for t in targets if isinstance(t, ast.Name))
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
    for node in nodes:
        match node:
            case ast.Attribute(value=value, attr=name):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[value, ast.Constant(value=str(name)), *_],
            ):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__") and name not in own:
            yield f"{ast.unparse(value)}.{name}", node.lineno


NEED_NO_FRAMEWORK = (
    "autopar",
    "autopar.cost_models",
    "autopar.searchers",
    "autopar.planner",
    "autopar.cli.app",
    "autopar.cli.unemitted",
)


def test_importing_needs_no_framework() -> None:
    """Nor with what stands before it in the list."""
    code = (
        "import importlib, sys\n"
        f"for module in {NEED_NO_FRAMEWORK!r}:\n"
        "    importlib.import_module(module)\n"
        f"    known = {FRAMEWORKS!r} & set(sys.modules)\n"
        "    assert not known, f'{module} imported {known}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    import autopar

    names = ["Workload", "load", "parallelize", "plan", "register_kernel", "register_rule"]
    assert sorted(autopar.__all__) == names
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


def test_no_circle_between_folders() -> None:
    """Of the folders in one folder, and its own files taken together, none imports another that
    imports it, however far round. Imports inside functions and for types count."""
    modules = {_module(file): file for _, file in sources()}
    folders = {name for name, file in modules.items() if file.name == "__init__.py"}
    assert {name.rpartition(".")[0] for name in modules} <= folders | {""}, "without __init__.py"
    graphs: dict[str, networkx.DiGraph] = {folder: networkx.DiGraph() for folder in folders}
    for name, file in modules.items():
        for full, line in imported(file):
            target = full if full in modules else full.rpartition(".")[0]
            if target not in modules:
                continue
            a, b = (_folders(module, folders) for module in (name, target))
            depth = sum(x == y for x, y in zip(a, b, strict=False))
            if a != b:  # a folder's own files stand under its name
                ends = [way[min(depth, len(way) - 1)] for way in (a, b)]
                graphs[a[depth - 1]].add_edge(*ends, at=f"{file.relative_to(ROOT)}:{line}")
    circles = [
        "\n".join(f"{graph.edges[a, b]['at']}: {a} -> {b}" for a, b in graph.subgraph(c).edges)
        for graph in graphs.values()
        for c in networkx.strongly_connected_components(graph)
        if len(c) > 1
    ]
    assert not circles, "\n\n".join(circles)


def test_names_say_what_they_hold() -> None:
    """In words of the field, so that nobody reads twice."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for _, file in sources()
        for name, line in read(file).names
        if name in SAY_NOTHING
    ]
    assert not wrong, "\n".join(wrong)


def _module(file: Path) -> str:
    inside = file.relative_to(ROOT).with_suffix("").parts
    parts = inside if inside[0] == "autopar" else ("autopar", *inside)
    return ".".join(part for part in parts if part != "__init__")


def _folders(module: str, folders: set[str]) -> list[str]:
    """The folders that hold a module, the outermost first."""
    parts = module.split(".")
    ways = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return [way for way in ways if way in folders]
