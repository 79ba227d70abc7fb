"""Module paths of ops, and names of tensors made from them.

JAX functions have no modules, but parameters have paths: an op that reads ``attention.q.weight`` is
of module ``attention.q``. Any other op is of the innermost module that holds both what it comes
from and where it leads, unless the user put it into a `jax.named_scope`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar.frontends.jax.draft import Draft, Node, Value
from autopar.frontends.jax.simplify import BINARY


def modules(draft: Draft, prefix: str) -> dict[Node, str]:
    """The module of each op, relative to ``prefix`` (the stack of layers, "" at top level)."""
    anchors = {n: _anchor(n, prefix) for n in draft.nodes}
    above = _reached(
        draft.nodes,
        anchors,
        lambda n: n.values,
        {v: "" for v in draft.inputs if v.role == "activation"},
    )
    below = _reached_down(draft, anchors)
    scopes: dict[Node, str] = {}
    for node in draft.nodes:
        own = anchors[node]
        scope = _relative(node.source.module, prefix)
        if own is not None:  # adding to what another module made is neither's own business
            joins = node.kind in BINARY and above[node]
            scopes[node] = (_common([own, above[node]]) or "") if joins else own
        elif scope:
            scopes[node] = scope
        elif above[node] is None:
            scopes[node] = _parent(below[node] or "")
        else:
            scopes[node] = _common([above[node], below[node]]) or ""
    return scopes


def _anchor(node: Node, prefix: str) -> str | None:
    paths = [_relative(v.path, prefix) for v in node.values if v.role == "parameter"]
    return _common([_parent(p) for p in paths]) if paths else None


def _reached(
    nodes: Iterable[Node],
    anchors: dict[Node, str | None],
    operands: Callable[[Node], Iterable[Value]],
    known: dict[Value, str],
) -> dict[Node, str | None]:
    """The common module of what each op is made from; None where that is only constants."""
    at: dict[Value, str | None] = dict(known)
    module_of: dict[Node, str | None] = {}
    for node in nodes:
        module_of[node] = _common([at[v] for v in operands(node) if v in at])
        own = anchors[node]
        here = "" if node.kind == "scan" else own if own is not None else module_of[node]
        at.update((out, here) for out in node.outputs)
    return module_of


def _reached_down(draft: Draft, anchors: dict[Node, str | None]) -> dict[Node, str | None]:
    """The common module of what each op leads to."""
    at: dict[Value, list[str | None]] = {v: [""] for v in draft.outputs if isinstance(v, Value)}
    module_of: dict[Node, str | None] = {}
    for node in reversed(draft.nodes):
        module_of[node] = _common([m for out in node.outputs for m in at.get(out, [])])
        own = anchors[node]
        here = "" if node.kind == "scan" else own if own is not None else module_of[node]
        for value in node.values:
            at.setdefault(value, []).append(here)
    return module_of


def _common(paths: Iterable[str | None]) -> str | None:
    known = [p.split(".") if p else [] for p in paths if p is not None]
    if not known:
        return None
    shared = []
    for parts in zip(*known, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def common_parent(paths: Iterable[str]) -> str:
    """The innermost module that holds all parameters of ``paths``."""
    return _common([_parent(p) for p in paths]) or ""


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _relative(path: str, prefix: str) -> str:
    """``path`` below ``prefix``, without the number of the layer."""
    if not prefix or not (path + ".").startswith(prefix + "."):
        return path
    rest = path[len(prefix) :].lstrip(".")
    head, _, tail = rest.partition(".")
    return tail if head.isdigit() else rest
