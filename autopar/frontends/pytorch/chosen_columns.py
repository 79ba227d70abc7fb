"""The indices ``t, k = torch.where(mask)`` of a mask of several dims, as experts find their tokens.

What is read at them, ``x[t]`` or ``w[t, k]``, is what each entry of the mask would read: an
expansion over the other dims. What is added at them, ``out.index_add_(0, t, y)``, is a sum over
those. Neither asks for all tokens, so that any of them may be somewhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.frontends.pytorch.chosen_rows import Rows, RowTable
from autopar.frontends.pytorch.ir import Value


@dataclass(frozen=True, slots=True)
class Column:
    """The indices along one dim of the places of ``mask``: dim ``dim`` of ``shape``, of which the
    rows of ``rows`` are the entries, one behind the other."""

    mask: Value
    rows: Rows
    shape: tuple[int, ...]
    dim: int


class Columns:
    """Those of one walk. of: by the value that has the indices."""

    def __init__(self, table: RowTable) -> None:
        self.table = table
        self.of: dict[Value, Column] = {}

    def in_order(self, mask: Value) -> tuple[Value, list[int]]:
        """The mask with its dims in the order of what it is a part of, and of each the dim that it
        was. Of ``one_hot(chosen).permute(2, 1, 0)[i]`` tokens are the first dim then, as they are
        of all else that is made of them; in which order the rows stand no reader may ask."""
        keys = self._order(mask)
        dims = sorted(range(len(keys)), key=lambda d: keys[d])
        if dims == [*range(len(dims))]:
            return mask, dims
        shape = tuple(mask.shape[d] for d in dims)
        return self.table.emit("transpose", [mask], shape, "bool", dims=tuple(dims)), dims

    def _order(self, value: Value) -> list[int]:
        """Of each dim its place in what ``value`` is a part of."""
        made = self.table.maker(value)
        if made is not None and len(made.inputs) == 1:
            (x,) = made.inputs
            if made.kind == "transpose":
                keys = self._order(x)
                return [keys[d] for d in made.attrs["dims"]]
            if made.kind == "select":
                keys = self._order(x)
                return [key for d, key in enumerate(keys) if d != made.attrs["dim"]]
            if x.shape == value.shape:
                return self._order(x)
        return [*range(len(value.shape))]

    def read_at(self, node: fx.Node) -> Value | None:
        """``x[t]`` or ``x[t, k]`` on all rows; None for other indices."""
        indices: Any = node.args[1]
        x = self.table.lifter.read(node.args[0])
        lead = next(i for i, index in enumerate(indices) if index is not None)
        read = [self.table.lifter.read(index) for index in indices[lead:] if index is not None]
        columns = [self.of[value] for value in read if value in self.of]
        apart = None in indices[lead : lead + len(read)]
        if x in self.table.rows or len(columns) < len(read) or apart:
            return None
        rows, shape, dims = columns[0].rows, columns[0].shape, [c.dim for c in columns]
        before, rest = x.shape[:lead], x.shape[lead + len(dims) :]
        same = {c.rows for c in columns} == {rows} and len(set(dims)) == len(dims)
        if not same or x.shape != (*before, *(shape[d] for d in dims), *rest):
            return None
        x = self._in_order_of(x, lead, dims)
        thin = (*before, *(n if d in dims else 1 for d, n in enumerate(shape)), *rest)
        wide = (*before, *shape, *rest)
        x = self.table.reshaped(x, thin)
        if thin != wide:
            x = self.table.emit("expand", [x], wide, x.dtype, shape=wide)
        x = self.table.reshaped(x, (*before, math.prod(shape), *rest))
        return self.table.cleaned(x, Rows(rows.mask, lead))

    def _in_order_of(self, x: Value, lead: int, dims: list[int]) -> Value:
        """x whose dims from ``lead`` on are ``dims`` of a mask with these in the mask's order."""
        own = sorted(range(len(dims)), key=lambda i: dims[i])
        order = (*range(lead), *(lead + i for i in own), *range(lead + len(own), len(x.shape)))
        if order == (*range(len(order)),):
            return x
        shape = tuple(x.shape[d] for d in order)
        return self.table.emit("transpose", [x], shape, x.dtype, dims=order)

    def added_at(self, x: Value, dim: int, index: Value, source: Value) -> Value | None:
        """x with the rows of ``source`` added along ``dim`` where ``index`` says; None where that
        is no column, or these are no rows at its places."""
        column, rows = self.of.get(index), self.table.rows.get(source)
        if column is None or rows != Rows(column.rows.mask, dim) or source.dtype != x.dtype:
            return None
        before, rest = x.shape[:dim], x.shape[dim + 1 :]
        flat = (*before, math.prod(column.shape), *rest)
        if x.shape[dim] != column.shape[column.dim] or source.shape != flat:
            return None
        kept = self.table.masked(source, rows, 0.0 if x.is_float else 0)
        kept = self.table.reshaped(kept, (*before, *column.shape, *rest))
        over = tuple(dim + d for d in range(len(column.shape)) if d != column.dim)
        if over:
            kept = self.table.emit("sum", [kept], x.shape, x.dtype, dims=over, keepdim=False)
        made = self.table.emit("add", [x, kept], x.shape, x.dtype)
        self.table.unchanged.of[made] = x, column.mask
        return made
