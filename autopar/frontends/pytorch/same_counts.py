"""Equal masks choose equally many rows: the sizes of ``a[mask]`` and ``b[mask]`` are one.

torch gives every choice by `torch.masked_select`, and every mask that is written anew, a size of
its own, and then cannot tell whether ``a[mask] * b[mask]`` has two shapes that fit.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import constrain_unify

from autopar.frontends.pytorch.constant_values import is_written, writes
from autopar.torch_private.modes import size_check

DEPTH = 8
"""How many ops back two masks are compared; what they are made from is the same tensor there."""
_aten = torch.ops.aten
_CHOOSING: dict[Any, int] = {
    _aten.masked_select.default: 1,
    _aten.index.Tensor: 1,
    _aten.nonzero.default: 0,
    _aten.nonzero_numpy.default: 0,
    _aten.where.default: 0,
}
"""Where in the arguments of an op the mask stands that chooses."""


class SameCounts:
    """The sizes that masks of one trace have made so far, by what each mask is computed as."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, Any] = {}
        self._last: fx.Node | None = None

    def settle(self) -> None:
        """Makes equal what the ops since the last time chose by equal masks."""
        mode = get_proxy_mode()
        if mode is None:
            return
        fresh = []
        newest: Any = mode.tracer.graph
        for node in reversed(newest.nodes):
            if node is self._last:
                break
            if node.target in _CHOOSING:
                fresh.append(node)
        self._last = next(iter(reversed(newest.nodes)), None)
        for node in reversed(fresh):
            self._of(node)

    def _of(self, node: fx.Node) -> None:
        first: Any = node.meta.get("val")
        if isinstance(first, list | tuple) and first:
            first = first[0]
        mask: Any = node.args[_CHOOSING[node.target]]
        if isinstance(mask, list | tuple):
            mask = mask[0] if len(mask) == 1 else None
        if not isinstance(mask, fx.Node) or not isinstance(first, torch.Tensor):
            return
        size: Any = first.shape[0] if first.dim() else None
        form, value = _form(mask), mask.meta.get("val")
        if not isinstance(size, torch.SymInt) or form is None or value is None:
            return
        if node.target is _aten.index.Tensor and value.dtype not in (torch.bool, torch.uint8):
            return
        whole: tuple[Any, ...] = tuple(value.shape)
        if node.target is _aten.masked_select.default:
            taken: Any = node.args[0]
            whole = tuple(torch.broadcast_shapes(value.shape, taken.meta["val"].shape))  # type: ignore[no-untyped-call]
        known = self._sizes.setdefault((form, _hashed(whole)), size)
        if known is size:
            return
        if any(s.node.expr.is_number for s in (known, size)):  # as many as another tensor's rows
            size_check(known == size)
        else:
            constrain_unify(known, size)


def _hashed(sizes: tuple[Any, ...]) -> Hashable:
    return tuple(n.node.expr if isinstance(n, torch.SymInt) else n for n in sizes)


def _form(node: fx.Node, depth: int = DEPTH) -> Hashable | None:
    """What ``node`` computes; None where something on the way is written to."""
    if is_written(node):
        return None
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if node.op != "call_function" or drawn or depth == 0:
        return node
    parts = {n: _form(n, depth - 1) for n in node.all_input_nodes}
    if None in parts.values() or writes(node):
        return None

    def part(value: Any) -> Hashable:
        if isinstance(value, list | tuple):
            return tuple(map(part, value))
        return parts[value] if isinstance(value, fx.Node) else repr(value)

    given = tuple(sorted((name, part(v)) for name, v in node.kwargs.items()))
    return (node.target, part(node.args), given)
