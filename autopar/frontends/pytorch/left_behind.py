"""What a forward leaves behind for the next one, beside its result: told, never dropped.

A program is the same at every step and keeps the model's tensors as they are, so a forward that
replaces a buffer, or counts in an attribute and computes with the count, has no program here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from autopar.frontends.pytorch.errors import MutationError

Numbers = Mapping[tuple[str, str], Any]
"""Plain attributes by (module path, name)."""

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


def check_counts(before: Numbers, after: Numbers, first: fx.Graph, second: fx.Graph) -> None:
    """Raises `MutationError` where a second forward is another one, for what the first left.

    ``first`` and ``second`` are traces of them, ``before`` and ``after`` the numbers around the
    first.
    """
    if _text(first) == _text(second):
        return
    changed = [(k, before.get(k), v) for k, v in after.items() if before.get(k) != v]
    shown = ", ".join(f"{'.'.join(filter(None, k))} ({a} to {b})" for k, a, b in changed[:3])
    raise MutationError(
        f"the forward counts in {shown} and computes with it, so the second step is not what the "
        f"first is. {_ADVICE}"
    )


def _text(graph: fx.Graph) -> str:
    """What the graph computes: ops whose results nothing reads are left out.

    torch makes such ops by itself where it prepares something once in a process, so the first
    forward of all has more of them than the second.
    """
    reached = _live(graph)
    live = [node for node in graph.nodes if node in reached]
    places = {node: f"%{place}" for place, node in enumerate(live)}

    def written(value: Any) -> str:
        return str(fx.node.map_arg(value, lambda node: places[node]))

    return "\n".join(f"{n.target} {written(n.args)} {written(n.kwargs)}" for n in live)


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the result or an effect comes from."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _has_effect(node) or any(user in live for user in node.users):
            live.add(node)
    return live


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op != "get_attr"
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable or not schema.returns or _is_mark(node)


def _is_mark(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "autopar"
