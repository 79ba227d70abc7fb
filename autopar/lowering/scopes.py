"""Which ops stand in which forward: the module tree that the program shows again.

A module of the model becomes a class of the program when its ops form one unbroken run, it reads
no parameter of another module, and it is more than one layer. The ops of all others (a linear, a
norm, a list) stand in the forward of the module around them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.kinds import CROSS_ENTROPIES

LONG_LEAF = 4  # ops that make a module without children a class of its own


@dataclass(slots=True)
class Scope:
    """One forward: ops in order, and runs of ops that are a child's forward."""

    path: str
    items: list[LoweredOp | Scope] = field(default_factory=list)

    def ops(self) -> Iterator[LoweredOp]:
        """Every op inside, children's included."""
        for item in self.items:
            if isinstance(item, Scope):
                yield from item.ops()
            else:
                yield item

    def children(self) -> Iterator[Scope]:
        """The scopes directly inside."""
        return (item for item in self.items if isinstance(item, Scope))


def module_path(op: LoweredOp) -> str:
    """The module that an op belongs to, relative to its graph: of a block the one that calls it,
    of the mean loss the root."""
    if op.op.kind in CROSS_ENTROPIES:
        return ""
    if op.op.kind == "block":
        parts = op.op.attrs["instance"].split(".")[:-1]
        listed = op.op.attrs["instance"].rpartition(".")[2].isdigit()
        return ".".join(parts[:-1] if listed else parts)
    return op.op.name.rpartition("/")[0]


def under(path: str, parent: str) -> bool:
    """Whether ``path`` is ``parent`` or inside it."""
    return not parent or path == parent or path.startswith(parent + ".")


def scopes(lowered: Lowered, whole: Container[str] | None = None) -> Scope:
    """The tree of forwards of a graph. ``whole``: the modules that may have one, None for all."""
    classes = {path for path in _classes(lowered) if whole is None or path in whole}
    root = Scope("")
    open_scopes = [root]
    for op in lowered.ops:
        path = module_path(op)
        while not (under(path, open_scopes[-1].path) and (path or len(open_scopes) == 1)):
            open_scopes.pop()
        for inner in sorted((c for c in classes if under(path, c)), key=len):
            if len(inner) > len(open_scopes[-1].path):
                child = Scope(inner)
                open_scopes[-1].items.append(child)
                open_scopes.append(child)
        open_scopes[-1].items.append(op)
    return root


def _classes(lowered: Lowered) -> set[str]:
    """The module paths that get a class."""
    places: dict[str, list[int]] = {}
    direct: dict[str, int] = {}
    outside: set[str] = set()
    blocks = [i for b in lowered.graph.blocks.values() for i in b.instances]
    owned: dict[str, set[str]] = {}
    for i, op in enumerate(lowered.ops):
        path = module_path(op)
        direct[path] = direct.get(path, 0) + 1
        for prefix in prefixes(path):
            places.setdefault(prefix, []).append(i)
            for name in op.op.inputs:
                tensor = lowered.graph.tensors[name]
                if tensor.role in ("parameter", "buffer"):
                    owned.setdefault(prefix, set()).add(name.rpartition(".")[0])
                    if not name.startswith(prefix + "."):
                        outside.add(prefix)
    paths = set()
    for path, indices in places.items():
        inner = {
            rest.split(".")[0]
            for p in (*places, *owned.get(path, ()), *blocks)
            if p != path and under(p, path) and (rest := p[len(path) + 1 :])
        }
        unbroken = indices[-1] - indices[0] + 1 == len(indices)
        listed = bool(inner) and all(name.isdigit() for name in inner) and not direct.get(path)
        large = len(indices) >= (2 if inner else LONG_LEAF)
        taken = any(under(path, b) for b in blocks)
        if unbroken and large and not listed and not taken and path not in outside:
            paths.add(path)
    return paths


def prefixes(path: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``; nothing of the root."""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
