"""What a forward leaves behind for the next one, beside its result: told, never dropped.

A program is the same at every step and keeps the model's tensors as they are, so a forward that
replaces a buffer, or counts in an attribute and computes with the count, has no program here.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from autopar.frontends.pytorch.errors import MutationError

if TYPE_CHECKING:
    from autopar.frontends.pytorch.trace import Trace

Numbers = Mapping[tuple[str, str], Any]
"""Plain attributes by (module path, name)."""

_SAME = frozenset(
    "alias detach to _to_copy slice contiguous view lift_fresh lift_fresh_copy".split()
)
_ADVICE = (
    "What a forward leaves behind is not carried from step to step: compute it from the batch "
    "inside the forward, or update it outside of the model between steps"
)


def numbers_of(model: nn.Module) -> Numbers:
    """Every attribute of every module that is a number, or a dict or list of numbers."""
    return {
        (path, name): value if _is_plain(value) else repr(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "training" and (_is_plain(value) or _holds_plain(value))
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _holds_plain(value: Any) -> bool:
    if not isinstance(value, dict | list) or not 0 < len(value) <= 64:
        return False
    return all(map(_is_plain, value.values() if isinstance(value, dict) else value))


def check_tensors(model: nn.Module, held: Mapping[tuple[str, str], Any], read: set[int]) -> None:
    """Raises `MutationError` naming a tensor of ``model`` that the forward put another one for.

    held: the tensors that the forward was given, by (module path, name).
    read: by ``id``, those of them that some op read.

    A plain attribute, or a buffer outside of the state, that no op read before it was replaced is
    made anew by every forward, and so may be.
    """
    for path, module in model.named_modules():
        here = {**vars(module), **module._buffers, **module._parameters}
        for name, value in here.items():
            before = held.get((path, name))
            if value is before or not isinstance(value, torch.Tensor):
                continue
            full = f"{path}.{name}" if path else name
            saved = name in module._buffers and name not in module._non_persistent_buffers_set
            if name in module._parameters:
                raise MutationError(f"the forward replaces parameter {full!r}. {_ADVICE}")
            if saved or (before is not None and id(before) in read):
                what = "buffer" if name in module._buffers else "tensor"
                raise MutationError(f"the forward updates {what} {full!r}. {_ADVICE}")


def check_same_again(first: Trace, second: Trace) -> None:
    """Raises `MutationError` where a second forward is another one, for what the first left.

    A tensor that the first made and put into an attribute, where the second finds and leaves it,
    is the same in both: a table that is made when it is first needed.
    """
    found = {node: name for name, node in first.made.items() if name in second.kept}
    if _text(first, found) == _text(second, {}):
        return
    before, after = first.before, first.left
    changed = [(k, before.get(k), v) for k, v in after.items() if before.get(k) != v]
    if changed:
        shown = ", ".join(f"{'.'.join(filter(None, k))} ({a} to {b})" for k, a, b in changed[:3])
        what = f"counts in {shown} and computes with it"
    else:
        what = f"keeps {', '.join(list(first.made)[:3])} and computes with it the next time"
    raise MutationError(
        f"the forward {what}, so the second step is not what the first is. {_ADVICE}"
    )


def _text(trace: Trace, found: Mapping[str, str]) -> str:
    """What the graph computes: ops whose results nothing reads are left out.

    ``found``: attributes by the names of nodes that stand for them. torch makes ops by itself where
    it prepares something once in a process, so the first forward of all has more of them than the
    second.
    """
    reached = _live(trace.graph, found)
    live = [node for node in trace.graph.nodes if node in reached]
    named = {node: found[node.name] for node in live if node.name in found}
    named |= {node: _held_name(trace, node) for node in live if node.op == "get_attr"}
    computed: list[fx.Node] = []
    for node in live:
        if node not in named and _changes_nothing(node):
            named[node] = named[node.args[0]]  # type: ignore[index]
        elif node not in named:
            named[node] = f"%{len(computed)}"
            computed.append(node)

    def written(value: Any) -> str:
        return str(fx.node.map_arg(value, lambda node: named[node]))

    return "\n".join(f"{n.target} {written(n.args)} {written(n.kwargs)}" for n in computed)


def _changes_nothing(node: fx.Node) -> bool:
    """A table that is found may be cut to the length that it has, or cast to its own dtype."""
    if getattr(node.target, "_opname", "") not in _SAME or not isinstance(node.args[0], fx.Node):
        return False
    given, made = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    return (given.shape, given.dtype) == (made.shape, made.dtype)


def _held_name(trace: Trace, node: fx.Node) -> str:
    """Of what a ``get_attr`` node reads: the model's name for it, else the trace's own."""
    tensor = operator.attrgetter(str(node.target))(trace.root)
    named = trace.named.get(id(tensor))
    return str(node.target) if named is None else named.name


def _live(graph: fx.Graph, found: Container[str]) -> set[fx.Node]:
    """Nodes that the result or an effect comes from; what is ``found`` comes from nothing."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        read = any(user in live and user.name not in found for user in node.users)
        if read or _has_effect(node):
            live.add(node)
    return live


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op != "get_attr"
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable or not schema.returns or _is_mark(node)


def _is_mark(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "autopar"
