"""Where a mask chooses rows, or its places do, and where such rows are written or added back."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch.chosen_columns import Column, Columns
from autopar.frontends.pytorch.chosen_rows import Rows, RowTable, is_open, symbols_of
from autopar.frontends.pytorch.ir import Value
from autopar.torch_private.ops import op_name


class Choices:
    """Ops of one trace that choose rows by masks, on all rows."""

    def __init__(self, table: RowTable) -> None:
        self.table, self.columns = table, Columns(table)
        self.choosing = {
            "index": self._index,
            "masked_select": self._select,
            "where": self._where,
            "nonzero": self._nonzero,
            "nonzero_numpy": self._places,
            "slice": self._first_places,
        }
        self.writing = {
            "index_put": self._written,
            "index_fill": self._index_fill,
            "index_add": self._index_add,
        }

    def made(self, node: fx.Node, name: str) -> Any:
        """What the op called ``name`` becomes; None where it neither chooses nor writes rows."""
        choosing = self.choosing.get(name)
        if choosing is not None and (made := choosing(node)) is not None:
            self._remember(node, made)
            return made
        writing = self.writing.get(name.removesuffix("_"))
        return None if writing is None else writing(node)

    def _index(self, node: fx.Node) -> Value | None:
        indices: Any = node.args[1]
        if len(indices) == 1 and (made := self._placed(node)) is not None:
            return made
        if (made := self.columns.read_at(node)) is not None:
            return made
        masks = [i for i in indices if i is not None and i.meta["val"].dtype == torch.bool]
        if not masks:
            return None
        if len(masks) > 1 or indices[0] is not masks[0] or any(i is not None for i in indices[1:]):
            raise self.table.refused("a mask beside other indices")
        x, mask = self.table.lifter.read(node.args[0]), self.table.lifter.read(masks[0])
        self.table.places.append(str(self.table.lifter.source))
        if x in self.table.rows or mask in self.table.rows:
            mine, its = self.table.rows.get(x), self.table.rows.get(mask)
            if mine is None or mine != its or mine.dim or mine.inner != 1:
                raise self.table.refused("a second choice among rows that a mask has chosen")
            thin = (*mine.mask.shape, *(1 for _ in mask.shape[1:]))
            outer = self.table.reshaped(mine.mask, thin)
            mask = self.table.emit("and", [outer, mask], mask.shape, "bool")
        rest = x.shape[len(mask.shape) :]
        flat = self.table.flattened(mask)
        shape = (flat.shape[0], *rest)
        return self.table.cleaned(self.table.reshaped(x, shape), Rows(flat))

    def _placed(self, node: fx.Node) -> Value | None:
        """``x[rows]`` with the places of a mask along dim 0: x, with the rows that it chooses."""
        indices: Any = node.args[1]
        x, mask = (
            self.table.lifter.read(node.args[0]),
            self.table.places_of.get(self.table.lifter.read(indices[0])),
        )
        if mask is None or x in self.table.rows or mask.shape != x.shape[:1]:
            return None
        return self.table.cleaned(x, Rows(self.table.flattened(mask)))

    def _mask_at(self, index: fx.Node | None) -> Value | None:
        """The mask that ``index`` is, or whose places it has."""
        value = self.table.lifter.read(index) if index is not None else None
        if not isinstance(value, Value):
            return None
        return value if value.dtype == "bool" else self.table.places_of.get(value)

    def _select(self, node: fx.Node) -> Value:
        """Entries of x where a mask of its shape is true; one that is expanded chooses runs."""
        x, mask = self.table.lifter.read(node.args[0]), self.table.lifter.read(node.args[1])
        if x in self.table.rows or mask in self.table.rows:
            raise self.table.refused("a second choice among rows that a mask has chosen")
        shape = tuple(torch.broadcast_shapes(x.shape, mask.shape))  # type: ignore[no-untyped-call]
        if x.shape != shape:
            x = self.table.emit("expand", [x], shape, x.dtype, shape=shape)
        self.table.places.append(str(self.table.lifter.source))
        while (made := self.table.maker(mask)) is not None and made.kind == "expand":
            mask = made.inputs[0]
        kept = (1,) * (len(shape) - len(mask.shape)) + mask.shape
        lead = max((d + 1 for d, n in enumerate(kept) if n != 1), default=0)
        if kept[:lead] != shape[:lead]:
            mask = self.table.emit("expand", [mask], shape, "bool", shape=shape)
            lead = len(shape)
        flat = self.table.flattened(mask)
        x = self.table.reshaped(x, (math.prod(shape),))
        return self.table.cleaned(x, Rows(flat, 0, math.prod(shape[lead:])))

    def _where(self, node: fx.Node) -> list[Value] | None:
        """The places where a condition holds, an index for each of its dims."""
        return self._places(node) if len(node.args) == 1 else None

    def _places(self, node: fx.Node) -> list[Value]:
        x = self.table.lifter.read(node.args[0])
        if x.dtype != "bool":
            x = self.table.emit("ne", [x], x.shape, "bool", other=0)
        return self._holding(x)

    def _holding(self, mask: Value) -> list[Value]:
        if mask in self.table.rows:
            raise self.table.refused("the places of rows that a mask has chosen")
        self.table.places.append(str(self.table.lifter.source))
        ordered, dims = self.columns.in_order(mask)
        shape, rows = ordered.shape, Rows(self.table.flattened(ordered))
        made = []
        for own, size in enumerate(mask.shape):
            dim = dims.index(own)
            steps = self.table.emit(
                "arange", [], (size,), "int64", start=0, stop=size, step=1, dtype="int64"
            )
            thin = tuple(size if d == dim else 1 for d in range(len(shape)))
            wide = self.table.emit(
                "expand", [self.table.reshaped(steps, thin)], shape, "int64", shape=shape
            )
            made.append(self.table.reshaped(wide, (math.prod(shape),)))
            self.table.rows[made[-1]] = rows
            self.columns.of[made[-1]] = Column(mask, rows, shape, dim)
            if len(shape) == 1:
                self.table.places_of[made[-1]] = mask
        return made

    def _nonzero(self, node: fx.Node) -> Value | None:
        """The places where x is not zero, a row of indices for each."""
        (first, *rest) = self._places(node)
        mask = self.table.places_of.get(first)
        thin = (*first.shape, 1)
        columns = [self.table.reshaped(c, thin) for c in (first, *rest)]
        made = columns[0]
        if rest:
            shape = (*first.shape, len(columns))
            made = self.table.emit("cat", columns, shape, "int64", dim=1)
        self.table.rows[made] = self.table.rows[first]
        if mask is not None:
            self.table.places_of[made] = mask
        return made

    def _first_places(self, node: fx.Node) -> Value | None:
        """``mask.nonzero()[:n]``, the first n of an expert: the places of a smaller mask."""
        x, (dim, start, stop, step) = self.table.lifter.read(node.args[0]), _slice_of(node)
        mask = self.table.places_of.get(x)
        if mask is None or x.shape != mask.shape or dim or step != 1 or min(start, stop) < 0:
            return None
        number = self.table.emit("cast", [mask], mask.shape, "int64", dtype="int64")
        number = self.table.emit("cumsum", [number], mask.shape, "int64", dim=0)
        for kind, bound in (("gt", start), ("le", stop)):
            if (kind, bound) != ("gt", 0):
                hit = self.table.emit(kind, [number], mask.shape, "bool", other=bound)
                mask = self.table.emit("and", [mask, hit], mask.shape, "bool")
        return self._holding(mask)[0]

    def _written(self, node: fx.Node) -> Value | None:
        """``x[mask] = y[mask]``: a choice between the two."""
        x, values = self.table.lifter.read(node.args[0]), self.table.lifter.read(node.args[2])
        indices: Any = node.args[1]
        rows = self.table.rows.get(values)
        mask = self._mask_at(indices[0]) if len(indices) == 1 else None
        accumulates = len(node.args) > 3 and node.args[3]
        if rows is None or x in self.table.rows or accumulates:
            return None
        if mask is None:
            return self._added_back(node)
        if mask.shape != x.shape[: len(mask.shape)]:  # the places of another dim
            return None
        if (rows.mask, rows.dim, rows.inner) != (self.table.flattened(mask), 0, 1):
            raise self.table.refused("a write of rows that another mask has chosen")
        values = self.table.reshaped(values, x.shape)
        if values.dtype != x.dtype:
            values = self.table.emit("cast", [values], x.shape, x.dtype, dtype=x.dtype)
        shape = (*mask.shape, *(1 for _ in x.shape[len(mask.shape) :]))
        made = self.table.emit(
            "where", [self.table.reshaped(mask, shape), values, x], x.shape, x.dtype
        )
        self.table.unchanged.of[made] = x, rows.mask
        return made

    def _added_back(self, node: fx.Node) -> Value | None:
        """``x[r] += y`` of the rows ``r, c = where(index == i)`` of a mask of several dims, as
        experts give back what they made of the tokens that chose them: a sum. What it is where a
        row is chosen twice torch leaves open."""
        x = self.table.lifter.read(node.args[0])
        indices: Any = node.args[1]
        total: Any = node.args[2]
        if len(indices) != 1 or op_name(total.target).removesuffix("_") != "add" or total.kwargs:
            return None
        given = list(total.args)
        own = [g for g in given if isinstance(g, fx.Node) and op_name(g.target) == "index"]
        own = [g for g in own if g.args[0] is node.args[0] and g.args[1] == indices]
        if len(given) != 2 or len(own) != 1:
            return None
        added = self.table.lifter.read(given[1 - given.index(own[0])])
        place = self.table.lifter.read(indices[0])
        if (made := self.columns.added_at(x, 0, place, added)) is not None:
            return made
        rows = self.table.rows.get(added)
        if rows is None or rows != self.table.rows.get(place) or (rows.dim, rows.inner) != (0, 1):
            return None
        if added.dtype != x.dtype or added.shape != (*place.shape, *x.shape[1:]):
            return None
        kept = self.table.masked(added, rows, 0.0 if x.is_float else 0)
        settings = {"dim": 0, "index": "%1", "source": "%2"}
        public = {"function": "torch.index_add", "args": ("%0",), "settings": settings}
        target = {"target": "aten.index_add.default", "args": ("%0", 0, "%1", "%2"), "kwargs": {}}
        call = {**target, "public": public}
        made = self.table.emit("aten::index_add", [x, place, kept], x.shape, x.dtype, torch=call)
        self.table.unchanged.of[made] = x, rows.mask
        return made

    def _index_fill(self, node: fx.Node) -> Value | None:
        """``x.index_fill(dim, mask.nonzero(), number)`` along a dim that the mask is of."""
        x, index = self.table.lifter.read(node.args[0]), self.table.lifter.read(node.args[2])
        mask, value = self.table.places_of.get(index), node.args[3]
        dim: Any = node.args[1]
        if mask is None or isinstance(value, fx.Node) or x in self.table.rows:
            return None
        shape = tuple(n if d == dim % len(x.shape) else 1 for d, n in enumerate(x.shape))
        if math.prod(shape) != mask.shape[0]:
            return None
        wide = self.table.reshaped(mask, shape)
        return self.table.emit("masked_fill", [x, wide], x.shape, x.dtype, value=value)

    def _index_add(self, node: fx.Node) -> Value | None:
        """``x.index_add(dim, rows, y[mask])`` of the rows of a mask along that dim: a plain sum."""
        x, index, source = (self.table.lifter.read(node.args[i]) for i in (0, 2, 3))
        mask, rows = self.table.places_of.get(index), self.table.rows.get(source)
        dim: Any = node.args[1]
        plain = x not in self.table.rows and node.kwargs.get("alpha", 1) == 1
        if mask is None and plain:
            return self.columns.added_at(x, dim % len(x.shape), index, source)
        if mask is None or rows is None or x in self.table.rows or node.kwargs.get("alpha", 1) != 1:
            return None
        same = (rows.mask, rows.dim, rows.inner) == (
            self.table.flattened(mask),
            dim % len(x.shape),
            1,
        )
        if not same or source.shape != x.shape or source.dtype != x.dtype:
            return None
        added = self.table.masked(source, rows, 0.0 if x.is_float else 0)
        made = self.table.emit("add", [x, added], x.shape, x.dtype)
        self.table.unchanged.of[made] = x, rows.mask
        return made

    def _remember(self, node: fx.Node, made: Value | list[Value]) -> None:
        """The symbol of how many rows there are, and how many there can be."""
        metas: Any = node.meta["val"]
        values = made if isinstance(made, list) else [made]
        for value, meta in zip(values, metas if isinstance(made, list) else [metas], strict=True):
            rows = self.table.rows[value]
            size = meta.shape[rows.dim]
            if is_open(size):
                self.table.most[symbols_of(size)] = value.shape[rows.dim]
                self.table.masks[symbols_of(size)] = rows.mask, rows.inner
        node.meta["val"] = self.table.filled(metas)


def _slice_of(node: fx.Node) -> tuple[int, int, int, int]:
    """dim, start, stop and step of a slice by numbers; a stop of -1 for another one."""
    given: Any = dict(zip(("self", "dim", "start", "end", "step"), node.args, strict=False))
    dim, start, stop, step = (given.get(n) for n in ("dim", "start", "end", "step"))
    numbers = (dim or 0, start or 0, stop, 1 if step is None else step)
    return numbers if all(isinstance(n, int) for n in numbers) else (0, 0, -1, 1)
