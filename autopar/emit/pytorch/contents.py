"""Which modules of the model a stage runs: those that it has whole, and parts of others."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.scopes import module_path, prefixes, under
from autopar.lowering.stages import remade


def whole_modules(part: Lowered, model: Lowered) -> frozenset[str]:
    """Paths of the modules of which ``part`` runs every op that ``model`` does."""
    here, every = _ops_below(part), _ops_below(model)
    return frozenset(path for path, ops in here.items() if len(ops) == len(every.get(path, ())))


def contents(part: Lowered, model: Lowered) -> list[str]:
    """``end of down``, ``layers.2 to 5``, ``head``: in the order of the forward.

    Leaves out what every stage makes for itself, and what stands in no module.
    """
    whole, every, again = whole_modules(part, model), _ops_below(model), remade(model)
    run = {op.op.name for op in part.ops}
    items: dict[str, str] = {}  # by path, how much of the module
    for op in part.ops:
        path = _path(op)
        if not path or again.issuperset(op.op.outputs):
            continue
        known = next((p for p in prefixes(path) if p in whole), "")
        items[known or path] = "" if known else _cut(every[path], run)
    for path in [p for p, cut in items.items() if cut]:
        inside = [p for p in items if p != path and under(p, path)]
        listed = any(p.rpartition(".")[2].isdigit() for p in inside)
        for gone in [path] if listed else inside:
            del items[gone]
    return list(_joined([cut + path for path, cut in items.items()]))


def _cut(ops: list[str], run: set[str]) -> str:
    """How much ``run`` has of a module with ``ops``."""
    place = "start" if ops[0] in run else "end" if ops[-1] in run else "middle"
    return f"{place} of "


def _path(op: LoweredOp) -> str:
    return str(op.op.attrs["instance"]) if op.op.kind == "block" else module_path(op)


def _ops_below(lowered: Lowered) -> dict[str, list[str]]:
    below: dict[str, list[str]] = {}
    for op in lowered.ops:
        for path in prefixes(_path(op)):
            below.setdefault(path, []).append(op.op.name)
    return below


def _joined(items: list[str]) -> Iterator[str]:
    """Numbered neighbours as one item."""
    start = 0
    for i, item in enumerate(items):
        head, _, number = item.rpartition(".")
        after = items[i + 1] if i + 1 < len(items) else ""
        if number.isdecimal() and after == f"{head}.{int(number) + 1}":
            continue
        yield f"{items[start]} to {number}" if i > start else item
        start = i + 1
