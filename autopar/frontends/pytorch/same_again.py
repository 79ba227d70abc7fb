"""Whether a second forward computes what the first did, whatever the first left behind."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch.errors import MutationError
from autopar.frontends.pytorch.left_behind import ADVICE
from autopar.frontends.pytorch.trace import Trace
from autopar.torch_private.ops import op_name, schema_of

_SAME = frozenset(
    "alias detach to _to_copy slice contiguous view lift_fresh lift_fresh_copy".split()
)
_INSTALLED = ("_output_capturing_hooks_installed",)
"""Where transformers notes that it has hooked into a model: no forward computes with that."""


def check_same_again(first: Trace, second: Trace) -> None:
    """Raises `MutationError` where a second forward is another one, for what the first left.

    A table that is made when it is first needed is the same in both: a tensor that the first made
    from no batch and no parameter and put into an attribute, and the second reads and leaves there.
    """
    given = _from_the_batch(first)
    tables = {
        node: name for name, node in first.made.items() if name in second.kept and node not in given
    }
    if _text(first, tables) == _text(second, {}):
        return
    before, after = first.before, first.left
    changed = [
        (k, before.get(k), v)
        for k, v in after.items()
        if before.get(k) != v and k[1] not in _INSTALLED
    ]
    if read := [name for name in first.made if name in _read_again(second, tables)]:
        what = f"keeps {', '.join(read[:3])} and computes with it the next time"
    elif changed:
        shown = ", ".join(f"{'.'.join(filter(None, k))} ({a} to {b})" for k, a, b in changed[:3])
        what = f"counts in {shown} and computes with it"
    else:
        what = f"keeps {', '.join(list(first.made)[:3])} and computes with it the next time"
    raise MutationError(
        f"the forward {what}, so the second step is not what the first is. {ADVICE}"
    )


def _read_again(second: Trace, tables: Mapping[str, str]) -> set[str]:
    """Attributes that the second forward finds and computes with, but for ``tables``."""
    live = _live(second.graph, {})
    read = {_held_name(second, n) for n in live if n.op == "get_attr"}
    return (read & second.kept) - set(tables.values())


def _from_the_batch(trace: Trace) -> set[str]:
    """Names of nodes whose numbers the batch, a parameter or chance decides."""
    names: set[str] = set()
    for node in trace.graph.nodes:
        if node.op == "get_attr":
            named = trace.named.get(id(_held(trace, node)))
            chosen = named is not None and named.role == "parameter"
        elif node.op == "placeholder":
            chosen = True
        else:
            given = node.all_input_nodes
            what = op_name(node.target)
            if what.endswith("_like") or what.startswith("new_"):
                given = given[1:]
            elif what in ("to", "type_as", "expand_as", "view_as", "reshape_as"):
                given = given[:1]
            tags = getattr(node.target, "tags", ())
            chosen = torch.Tag.nondeterministic_seeded in tags or any(
                n.name in names for n in given
            )
        if chosen:
            names.add(node.name)
    return names


def _text(trace: Trace, tables: Mapping[str, str]) -> str:
    """What the graph computes: ops whose results nothing reads are left out.

    ``tables``: attributes by the names of nodes that stand for them. torch makes ops by itself
    where it prepares something once in a process, so the first forward of all has more of them
    than the second.
    """
    reached = _live(trace.graph, tables)
    live = [node for node in trace.graph.nodes if node in reached]
    named = {node: tables[node.name] for node in live if node.name in tables}
    named |= {node: _held_name(trace, node) for node in live if node.op == "get_attr"}
    computed: list[fx.Node] = []
    for node in live:
        if node not in named and _changes_nothing(node):
            named[node] = named[node.args[0]]
        elif node not in named:
            named[node] = f"%{len(computed)}"
            computed.append(node)

    def written(value: Any) -> str:
        return str(fx.node.map_arg(value, lambda node: named[node]))

    return "\n".join(f"{n.target} {written(n.args)} {written(n.kwargs)}" for n in computed)


def _changes_nothing(node: fx.Node) -> bool:
    """A table that is tables may be cut to the length that it has, or cast to its own dtype."""
    if op_name(node.target) not in _SAME or not isinstance(node.args[0], fx.Node):
        return False
    given, made = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    return (given.shape, given.dtype) == (made.shape, made.dtype)


def _held(trace: Trace, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(trace.root)


def _held_name(trace: Trace, node: fx.Node) -> str:
    """Of what a ``get_attr`` node reads: the model's name for it, else the trace's own."""
    named = trace.named.get(id(_held(trace, node)))
    return str(node.target) if named is None else named.name


def _live(graph: fx.Graph, tables: Container[str]) -> set[fx.Node]:
    """Nodes that the result or an effect comes from; what is ``tables`` comes from nothing."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        read = any(user in live and user.name not in tables for user in node.users)
        if read or _has_effect(node):
            live.add(node)
    return live


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op != "get_attr"
    schema = schema_of(node.target)
    return schema is None or schema.is_mutable or not schema.returns or _is_mark(node)


def _is_mark(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "autopar"
