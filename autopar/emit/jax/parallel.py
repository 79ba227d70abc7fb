"""``parallel.py``: of `autopar.runtime.jax.parallel`, what the two other files of a program use.

The modules there import jax, numpy and each other. They are read as text and put together, without
what nothing in the program reaches, so that a program needs nothing else.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.emit.text import docstring

FILE = "parallel.py"
NAME = "parallel"
MODULES = (
    "tables", "zigzag", "collectives", "attention_kernels", "attention_rows", "ring_attention",
    "ops", "loss_head", "grouped", "blocks", "layout", "units", "gradients", "optimizer",
    "loss_scale", "outputs", "placing", "part", "step", "pieces", "pull_backs", "halves",
    "joint", "stage_step", "sends", "totals", "ties", "actions", "playing", "pipeline", "start",
    "kept", "leaving",
)  # fmt: skip
"""In the order in which they stand in the file."""
_HOME = Path(__file__).parents[2] / "runtime" / "jax" / "parallel"
_PACKAGE = "autopar.runtime.jax.parallel"


@dataclass(frozen=True, slots=True)
class Piece:
    """A statement at the top of a module: the names that it makes and those that it reads.

    An expression makes nothing; it comes along with the name that it ``belongs`` to. What is
    ``long`` stands between two empty lines.
    """

    module: str
    text: str
    makes: frozenset[str]
    reads: frozenset[str]
    long: bool
    belongs: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """All pieces, in order; the import that makes each foreign name; a heading for each module."""

    pieces: tuple[Piece, ...]
    imports: Mapping[str, str]
    headings: Mapping[str, str]


def parallel_text(programs: Iterable[str], about: Iterable[str]) -> str:
    """The file for ``programs``, texts that import from it. ``about``: lines of its docstring."""
    sources = _sources()
    kept = _reached(sources.pieces, {name for text in programs for name in imported(text)})
    read = frozenset().union(*(piece.reads for piece in kept))
    imports = sorted({line for name, line in sources.imports.items() if name in read})
    text = f"{docstring(tuple(about))}\n\nfrom __future__ import annotations\n\n"
    text += _import_lines(imports) + "\n"
    before: Piece | None = None
    for piece in kept:
        apart = "\n\n" if piece.long or (before is not None and before.long) else "\n"
        if before is None or piece.module != before.module:
            text += ("\n" if before is None else "\n\n") + f"{sources.headings[piece.module]}\n"
            apart = "\n\n" if piece.long else "\n"
        elif piece.belongs and not piece.long:
            apart = ""
        text += f"{apart}{piece.text}\n"
        before = piece
    return text


def imported(text: str) -> set[str]:
    """The names that a program imports from ``parallel.py``."""
    return {
        name.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == NAME
        for name in node.names
    }


def _reached(pieces: tuple[Piece, ...], roots: set[str]) -> list[Piece]:
    """The pieces that make ``roots`` and, in turn, what those read."""
    makers = {name: piece for piece in pieces for name in piece.makes}
    wanted: set[str] = set()
    to_do = [name for name in roots if name in makers]
    while to_do:
        name = to_do.pop()
        if name in wanted:
            continue
        wanted.add(name)
        beside = [p for p in pieces if p.belongs == name]
        for piece in (makers[name], *beside):
            to_do += [n for n in piece.reads if n in makers and n not in wanted]
    return [p for p in pieces if p.makes & wanted or p.belongs in wanted]


@functools.cache
def _sources() -> Sources:
    pieces: list[Piece] = []
    imports: dict[str, str] = {}
    headings: dict[str, str] = {}
    for name in MODULES:
        text = (_HOME / f"{name}.py").read_text()
        tree = ast.parse(text)
        headings[name] = _heading(ast.get_docstring(tree) or name)
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports |= dict(_imports(node))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
                other = (node.module or "").rpartition(".")[2]
                assert other in MODULES, f"{name} reads {other}, which is no part of the file"
        pieces += _pieces(name, text, tree)
    made = Counter(name for piece in pieces for name in piece.makes)
    twice = sorted(name for name, count in made.items() if count > 1)
    assert not twice, f"several modules of one file make {', '.join(twice)}"
    return Sources(tuple(pieces), imports, headings)


def _heading(doc: str) -> str:
    """The first paragraph of a module's docstring, above all that is its."""
    first = " ".join(doc.split("\n\n")[0].split())
    lines = textwrap.wrap(first, 96)
    return "\n".join(["# " + "-" * 98, *(f"# {line}" for line in lines), "# " + "-" * 98])


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """(name, the line that imports it) of what is not one of these modules."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
        (_PACKAGE, "__future__")
    ):
        return
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        shown = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
        start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
        yield name, f"{start}import {shown}"


def _pieces(module: str, text: str, tree: ast.Module) -> Iterator[Piece]:
    """The statements of a module behind its docstring and imports, with the comments above them."""
    lines = text.splitlines()
    last_end, before = 0, ""
    for place, node in enumerate(tree.body):
        start, end = _first_line(node), node.end_lineno or 0
        above = last_end
        last_end = end
        if isinstance(node, ast.Import | ast.ImportFrom) or place == 0:
            continue
        comments = [line for line in lines[above : start - 1] if line.startswith("#")]
        comments = [line for line in comments if not line.startswith("# -- ")]
        made = frozenset(_made(node))
        whole = "\n".join([*comments, *lines[start - 1 : end]])
        if made:
            before = next(iter(sorted(made)))
            short = isinstance(node, ast.Assign | ast.AnnAssign)
            yield Piece(module, whole, made, _read(node), not short)
        else:
            owner = _owner(node)
            yield Piece(module, whole, made, _read(node), bool(owner), owner or before)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _made(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    for target in targets:
        yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def _owner(node: ast.stmt) -> str:
    """``f`` of ``f.defvjp(...)``; nothing of a string, which documents what stands above it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return function.value.id
    return ""


def _read(node: ast.stmt) -> frozenset[str]:
    """Names that a statement reads, those of annotations among them."""
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def _import_lines(lines: Iterable[str]) -> str:
    """Sorted and joined: the standard library first, then the others."""
    names: dict[str, list[str]] = {}
    whole = []
    for line in lines:
        match = re.fullmatch(r"from (\S+) import (.+)", line)
        if match:
            names.setdefault(match[1], []).append(match[2])
        else:
            whole.append(line)
    every = [(line.split()[1], line) for line in whole]
    every += [(m, f"from {m} import {', '.join(sorted(ns))}") for m, ns in names.items()]
    others = ("jax", "numpy")
    own = [(m, line) for m, line in every if m.split(".")[0] not in others]
    rest = [(m, line) for m, line in every if m.split(".")[0] in others]

    def ordered(rows: list[tuple[str, str]]) -> list[str]:
        return [line for _, line in sorted(rows, key=lambda r: (r[1].startswith("from"), r[0]))]

    return "\n".join([*ordered(own), *[""] * bool(own), *ordered(rest)])
