"""Rows that a mask chooses: ``x[mask]``, `torch.masked_select`, `torch.where` of a condition alone.

How many there are only the batch knows, and a program has one shape. So all rows are computed, and
the mask travels with them: where rows are added up those that it leaves out are zeros, a mean
divides by the count, a largest one meets minus infinity, a cross-entropy ignores their labels. In
the trace such a size is a symbol (u0), so every place that reads it is seen; what would read all
rows together is refused by name.

The rows that are left out are ones (integers zeros) from the start: whatever the forward does to
them, a logarithm or a quotient, is finite, and its gradient is not NaN times zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch.chosen_ops import Following
from autopar.frontends.pytorch.chosen_places import Choices
from autopar.frontends.pytorch.chosen_rows import Rows, RowTable, Walk, is_open, symbols_of
from autopar.frontends.pytorch.constant_values import writes
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.sizes_asked import total_asked
from autopar.torch_private.ops import op_name, schema_of

_SHAPED = frozenset(
    "view reshape expand _unsafe_view unflatten new_zeros new_ones new_full zeros ones full "
    "rand randn repeat".split()
)
"""Ops that may take such a size as a shape: what they make has rows, or is refused."""
_COUNTED = frozenset("add sub rsub mul div true_divide pow".split())
"""Ops that may compute with it as a number."""


class Size(int):
    """A size that the batch decides, as large as it can be; ``symbols`` is what it is."""

    symbols: Any

    @staticmethod
    def of(most: int, symbols: Any) -> Size:
        made = Size(most)
        made.symbols = symbols
        return made


def _unread_from(node: fx.Node) -> set[fx.Node]:
    """``node``, of which the batch decides a size, and all that is made of it, where nothing else
    reads that; else nothing."""
    if not _is_open(node):
        return set()
    todo, seen = [node], {node}
    while todo:
        read = todo.pop()
        if read.op != "call_function" or writes(read):
            return set()
        todo += [user for user in read.users if user not in seen]  # the last is near the loss
        seen.update(read.users)
    return seen


def _is_open(node: fx.Node) -> bool:
    """Whether it makes tensors of which the batch decides a size."""
    made = node.meta.get("val")
    listed = made if isinstance(made, list | tuple) else [made]
    tensors = [t for t in listed if isinstance(t, torch.Tensor)]
    return any(is_open(n) for t in tensors for n in t.shape)


class Chosen:
    """What of one walk has rows that a mask chooses."""

    def __init__(self, lifter: Walk) -> None:
        self.table = RowTable(lifter)
        self._choices, self._following = Choices(self.table), Following(self.table)
        self._unread: set[fx.Node] = set()

    def is_unread(self, node: fx.Node) -> bool:
        """Whether only checks, which a trace has not, read what has such rows in it."""
        if node not in self._unread:
            self._unread |= _unread_from(node)
        return node in self._unread

    def is_size(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)

    def size(self, node: fx.Node) -> Size:
        """What stands for a size in calls that take shapes."""
        value: Any = node.meta["val"]
        if isinstance(value, torch.SymFloat):
            raise self.table.refused("a number that is made of how many rows there are")
        return Size.of(self.table.static(value), value.node.expr)

    def meets(self, node: fx.Node) -> bool:
        """Whether rows that a mask chooses go into ``node`` or come from it."""
        return _is_open(node) or self.reach(node)

    def reach(self, node: fx.Node) -> bool:
        """Whether ``node`` is given such rows."""
        return any(map(self._has_rows, node.all_input_nodes))

    def _has_rows(self, node: fx.Node) -> bool:
        given = self.table.lifter.env.get(node)
        values = given if isinstance(given, list) else [given]
        return isinstance(given, Size) or any(
            isinstance(v, Value) and v in self.table.rows for v in values
        )

    def lift(self, node: fx.Node) -> Any:
        """What ``node`` becomes on all rows."""
        lifter = self.table.lifter
        name = op_name(node.target)
        before = node.meta.get("val")
        if (known := total_asked(node)) is not None:
            size, total = known
            self.table.most[symbols_of(size)] = total
            node.meta["val"] = self.table.filled(before)
            return lifter.lifted_plainly(node)
        if (made := self._choices.made(node, name)) is not None:
            return made
        counts = self._counts(node, name.removesuffix("_"))
        node.meta["val"] = self.table.filled(before)
        start = len(lifter.nodes)
        outer, lifter.cast = lifter.cast, {**lifter.cast, **counts}
        try:
            result = lifter.lifted_plainly(node)
        finally:
            lifter.cast = outer
        fresh = lifter.nodes[start:]
        del lifter.nodes[start:]
        for each in fresh:
            self.follow(each)
        self._mark_made(result, before, node)
        return result

    def follow(self, node: Node) -> None:
        """Appends ``node`` to the walk, with masks where rows go into it."""
        self._following.follow(node)

    def _counts(self, node: fx.Node, name: str) -> dict[fx.Node, Value]:
        """What ``node`` reads in the place of sizes that it computes with."""
        sizes = {
            n: s
            for n in node.all_input_nodes
            if isinstance(s := self.table.lifter.env.get(n), Size)
        }
        arguments = schema_of(node.target).arguments
        given = {a.name: v for a, v in zip(arguments, node.args, strict=False)} | node.kwargs
        for argument in arguments:
            read: list[fx.Node] = []
            fx.node.map_arg(given.get(argument.name), read.append)
            if not sizes.keys() & set(read):
                continue
            shape = "int" in str(argument.type).lower()
            if name not in (_SHAPED if shape else _COUNTED):
                raise self.table.refused(f"{name} of how many rows there are")
        return {} if name in _SHAPED else {n: self.table.count(s.symbols) for n, s in sizes.items()}

    def _mark_made(self, result: Any, before: Any, node: fx.Node) -> None:
        """Rows of what is made from a size alone; what should have rows must have them."""
        values = result if isinstance(result, list) else [result]
        metas = before if isinstance(before, list | tuple) else [before]
        for value, meta in zip(values, metas, strict=False):
            if not isinstance(value, Value) or not isinstance(meta, torch.Tensor):
                continue
            open_dims = [d for d, n in enumerate(meta.shape) if is_open(n)]
            known = self.table.rows.get(value)
            if not open_dims and known is None:
                continue
            if known is None and len(open_dims) == 1:
                maker = self.table.lifter.nodes[-1]
                symbols = symbols_of(meta.shape[open_dims[0]])
                if maker.kind in ("full", "expand", "noise") and symbols in self.table.masks:
                    mask, inner = self.table.masks[symbols]
                    known = self.table.rows[value] = Rows(mask, open_dims[0], inner)
            if known is None or open_dims != [known.dim]:
                raise self.table.refused(str(node.target))
