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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.sizes_asked import total_asked
from autopar.frontends.pytorch.skipped_check import Unchanged
from autopar.nouns.graph import Op, Source, Tensor
from autopar.rules.notation import BoundRule
from autopar.rules.registry import UnruledOp, bind

_FILLED = {"sum": 0.0, "amax": -math.inf, "amin": math.inf, "any": False, "all": True}
"""What rows that are left out are to a reduction."""
_MADE_AGAIN = frozenset("eq ne lt le gt ge not and or cast select slice transpose".split())
"""Kinds of which masks are made, and may be made again in the same way."""
_ADDING = ("aten::index_add", "scatter_sum", "aten::scatter_add")
"""Kinds that add rows of their last floating operand to others."""
_SHAPED = frozenset(
    "view reshape expand _unsafe_view unflatten new_zeros new_ones new_full zeros ones full "
    "rand randn repeat".split()
)
"""Ops that may take such a size as a shape: what they make has rows, or is refused."""
_COUNTED = frozenset("add sub rsub mul div true_divide pow".split())
"""Ops that may compute with it as a number."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Of a value dim ``dim`` has the rows of ``mask`` [t], each of ``inner`` entries in a row."""

    mask: Value
    dim: int = 0
    inner: int = 1


class Walk(Protocol):
    """The walk over a trace that this serves: see `autopar.frontends.pytorch.lifter`."""

    nodes: list[Node]
    env: dict[fx.Node, Any]
    cast: dict[fx.Node, Value]
    source: Source

    def read(self, node: Any) -> Any: ...

    def lifted_plainly(self, node: fx.Node) -> Any: ...

    def emit(
        self,
        kind: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        dtype: str,
        /,
        **attrs: Any,
    ) -> Value: ...


class Size(int):
    """A size that the batch decides, as large as it can be; ``symbols`` is what it is."""

    symbols: Any

    @staticmethod
    def of(most: int, symbols: Any) -> Size:
        made = Size(most)
        made.symbols = symbols
        return made


class Chosen:
    """What of one walk has rows that a mask chooses. ``places``: where masks choose."""

    def __init__(self, lifter: Walk) -> None:
        self.lifter = lifter
        self.rows: dict[Value, Rows] = {}
        self.places: list[str] = []
        self._masks: dict[Any, tuple[Value, int]] = {}  # by symbol, with how often each row counts
        self.unchanged = Unchanged(self._masks, self._first_alike)
        self._most: dict[Any, int] = {}  # by symbol, how large it can be
        self._flat: dict[Value, Value] = {}
        self._alike: dict[tuple[Any, ...], Value] = {}
        self._places_of: dict[Value, Value] = {}  # indices, of the mask in one dim that they are of

    # -- from the trace ----------------------------------------------------------------------------

    def is_size(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)

    def size(self, node: fx.Node) -> Size:
        """What stands for a size in calls that take shapes."""
        value: Any = node.meta["val"]
        if isinstance(value, torch.SymFloat):
            raise self._refused("a number that is made of how many rows there are")
        return Size.of(self._static(value), value.node.expr)

    def meets(self, node: fx.Node) -> bool:
        """Whether rows that a mask chooses go into ``node`` or come from it."""
        made = node.meta.get("val")
        listed = made if isinstance(made, list | tuple) else [made]
        tensors = [t for t in listed if isinstance(t, torch.Tensor)]
        if any(_is_open(n) for t in tensors for n in t.shape):
            return True
        return self.reach(node)

    def reach(self, node: fx.Node) -> bool:
        """Whether ``node`` is given such rows."""
        return any(map(self._has_rows, node.all_input_nodes))

    def _has_rows(self, node: fx.Node) -> bool:
        given = self.lifter.env.get(node)
        values = given if isinstance(given, list) else [given]
        return isinstance(given, Size) or any(
            isinstance(v, Value) and v in self.rows for v in values
        )

    def lift(self, node: fx.Node) -> Any:
        """What ``node`` becomes on all rows."""
        lifter = self.lifter
        name = node.target._opname  # type: ignore[union-attr]
        entries: Mapping[str, Callable[[fx.Node], Value | list[Value] | None]] = {
            "index": self._index,
            "masked_select": self._select,
            "where": self._where,
            "nonzero": self._nonzero,
            "nonzero_numpy": self._places,
            "slice": self._first_places,
        }
        entry = entries.get(name)
        before = node.meta.get("val")
        if (known := total_asked(node)) is not None:
            size, total = known
            self._most[_symbols(size)] = total
            node.meta["val"] = self._filled(before)
            return lifter.lifted_plainly(node)
        if entry is not None and (made := entry(node)) is not None:
            self._remember(node, made)
            return made
        writes = {"index_put": self._written, "index_fill": self._index_fill}
        writes |= {"index_add": self._index_add}
        write = writes.get(name.removesuffix("_"))
        if write is not None and (made := write(node)) is not None:
            return made
        counts = self._counts(node, name.removesuffix("_"))
        node.meta["val"] = self._filled(before)
        start = len(lifter.nodes)
        outer, lifter.cast = lifter.cast, {**lifter.cast, **counts}
        try:
            result = lifter.lifted_plainly(node)
        finally:
            lifter.cast = outer
        fresh = lifter.nodes[start:]
        del lifter.nodes[start:]
        for each in fresh:
            self._follow(each)
        self._mark_made(result, before, node)
        return result

    def _counts(self, node: fx.Node, name: str) -> dict[fx.Node, Value]:
        """What ``node`` reads in the place of sizes that it computes with."""
        sizes = {
            n: s for n in node.all_input_nodes if isinstance(s := self.lifter.env.get(n), Size)
        }
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        given = {a.name: v for a, v in zip(arguments, node.args, strict=False)} | node.kwargs
        for argument in arguments:
            read: list[fx.Node] = []
            fx.node.map_arg(given.get(argument.name), read.append)
            if not sizes.keys() & set(read):
                continue
            shape = "int" in str(argument.type).lower()
            if name not in (_SHAPED if shape else _COUNTED):
                raise self._refused(f"{name} of how many rows there are")
        return {} if name in _SHAPED else {n: self._count(s.symbols) for n, s in sizes.items()}

    def _mark_made(self, result: Any, before: Any, node: fx.Node) -> None:
        """Rows of what is made from a size alone; what should have rows must have them."""
        values = result if isinstance(result, list) else [result]
        metas = before if isinstance(before, list | tuple) else [before]
        for value, meta in zip(values, metas, strict=False):
            if not isinstance(value, Value) or not isinstance(meta, torch.Tensor):
                continue
            open_dims = [d for d, n in enumerate(meta.shape) if _is_open(n)]
            known = self.rows.get(value)
            if not open_dims and known is None:
                continue
            if known is None and len(open_dims) == 1:
                maker = self.lifter.nodes[-1]
                symbols = _symbols(meta.shape[open_dims[0]])
                if maker.kind in ("full", "expand", "noise") and symbols in self._masks:
                    mask, inner = self._masks[symbols]
                    known = self.rows[value] = Rows(mask, open_dims[0], inner)
            if known is None or open_dims != [known.dim]:
                raise self._refused(str(node.target))

    # -- where masks choose ------------------------------------------------------------------------

    def _index(self, node: fx.Node) -> Value | None:
        indices: Any = node.args[1]
        if len(indices) == 1 and (made := self._placed(node)) is not None:
            return made
        masks = [i for i in indices if i is not None and i.meta["val"].dtype == torch.bool]
        if not masks:
            return None
        if len(masks) > 1 or indices[0] is not masks[0] or any(i is not None for i in indices[1:]):
            raise self._refused("a mask beside other indices")
        x, mask = self.lifter.read(node.args[0]), self.lifter.read(masks[0])
        self.places.append(str(self.lifter.source))
        if x in self.rows or mask in self.rows:
            mine, its = self.rows.get(x), self.rows.get(mask)
            if mine is None or mine != its or mine.dim or mine.inner != 1:
                raise self._refused("a second choice among rows that a mask has chosen")
            both = self._emit("and", [mine.mask, mask], mask.shape, "bool")
            return self._cleaned(x, Rows(both))
        rest = x.shape[len(mask.shape) :]
        flat = self._flattened(mask)
        shape = (flat.shape[0], *rest)
        return self._cleaned(self._reshaped(x, shape), Rows(flat))

    def _placed(self, node: fx.Node) -> Value | None:
        """``x[rows]`` with the places of a mask along dim 0: x, with the rows that it chooses."""
        indices: Any = node.args[1]
        x, mask = self.lifter.read(node.args[0]), self._places_of.get(self.lifter.read(indices[0]))
        if mask is None or x in self.rows or mask.shape != x.shape[:1]:
            return None
        return self._cleaned(x, Rows(self._flattened(mask)))

    def _mask_at(self, index: fx.Node | None) -> Value | None:
        """The mask that ``index`` is, or whose places it has."""
        value = self.lifter.read(index) if index is not None else None
        if not isinstance(value, Value):
            return None
        return value if value.dtype == "bool" else self._places_of.get(value)

    def _select(self, node: fx.Node) -> Value:
        """Entries of x where a mask of its shape is true; one that is expanded chooses runs."""
        x, mask = self.lifter.read(node.args[0]), self.lifter.read(node.args[1])
        if x in self.rows or mask in self.rows:
            raise self._refused("a second choice among rows that a mask has chosen")
        shape = tuple(torch.broadcast_shapes(x.shape, mask.shape))  # type: ignore[no-untyped-call]
        if x.shape != shape:
            x = self._emit("expand", [x], shape, x.dtype, shape=shape)
        self.places.append(str(self.lifter.source))
        while (made := self._maker(mask)) is not None and made.kind == "expand":
            mask = made.inputs[0]
        kept = (1,) * (len(shape) - len(mask.shape)) + mask.shape
        lead = max((d + 1 for d, n in enumerate(kept) if n != 1), default=0)
        if kept[:lead] != shape[:lead]:
            mask = self._emit("expand", [mask], shape, "bool", shape=shape)
            lead = len(shape)
        flat = self._flattened(mask)
        x = self._reshaped(x, (math.prod(shape),))
        return self._cleaned(x, Rows(flat, 0, math.prod(shape[lead:])))

    def _where(self, node: fx.Node) -> list[Value] | None:
        """The places where a condition holds, an index for each of its dims."""
        return self._places(node) if len(node.args) == 1 else None

    def _places(self, node: fx.Node) -> list[Value]:
        x = self.lifter.read(node.args[0])
        if x.dtype != "bool":
            x = self._emit("ne", [x], x.shape, "bool", other=0)
        return self._holding(x)

    def _holding(self, mask: Value) -> list[Value]:
        if mask in self.rows:
            raise self._refused("the places of rows that a mask has chosen")
        self.places.append(str(self.lifter.source))
        shape, rows = mask.shape, Rows(self._flattened(mask))
        made = []
        for dim, size in enumerate(shape):
            steps = self._emit(
                "arange", [], (size,), "int64", start=0, stop=size, step=1, dtype="int64"
            )
            thin = tuple(size if d == dim else 1 for d in range(len(shape)))
            wide = self._emit("expand", [self._reshaped(steps, thin)], shape, "int64", shape=shape)
            made.append(self._reshaped(wide, (math.prod(shape),)))
            self.rows[made[-1]] = rows
            if len(shape) == 1:
                self._places_of[made[-1]] = mask
        return made

    def _nonzero(self, node: fx.Node) -> Value | None:
        """The places where x is not zero, a row of indices for each."""
        (first, *rest) = self._places(node)
        mask = self._places_of.get(first)
        thin = (*first.shape, 1)
        columns = [self._reshaped(c, thin) for c in (first, *rest)]
        made = columns[0]
        if rest:
            shape = (*first.shape, len(columns))
            made = self._emit("cat", columns, shape, "int64", dim=1)
        self.rows[made] = self.rows[first]
        if mask is not None:
            self._places_of[made] = mask
        return made

    def _first_places(self, node: fx.Node) -> Value | None:
        """``mask.nonzero()[:n]``, the first n of an expert: the places of a smaller mask."""
        x, (dim, start, stop, step) = self.lifter.read(node.args[0]), _slice_of(node)
        mask = self._places_of.get(x)
        if mask is None or x.shape != mask.shape or dim or step != 1 or min(start, stop) < 0:
            return None
        number = self._emit("cast", [mask], mask.shape, "int64", dtype="int64")
        number = self._emit("cumsum", [number], mask.shape, "int64", dim=0)
        for kind, bound in (("gt", start), ("le", stop)):
            if (kind, bound) != ("gt", 0):
                hit = self._emit(kind, [number], mask.shape, "bool", other=bound)
                mask = self._emit("and", [mask, hit], mask.shape, "bool")
        return self._holding(mask)[0]

    def _written(self, node: fx.Node) -> Value | None:
        """``x[mask] = y[mask]``: a choice between the two."""
        x, values = self.lifter.read(node.args[0]), self.lifter.read(node.args[2])
        indices: Any = node.args[1]
        rows = self.rows.get(values)
        mask = self._mask_at(indices[0]) if len(indices) == 1 else None
        accumulates = len(node.args) > 3 and node.args[3]
        if mask is None or rows is None or x in self.rows or accumulates:
            return None
        if mask.shape != x.shape[: len(mask.shape)]:  # the places of another dim
            return None
        if (rows.mask, rows.dim, rows.inner) != (self._flattened(mask), 0, 1):
            raise self._refused("a write of rows that another mask has chosen")
        values = self._reshaped(values, x.shape)
        if values.dtype != x.dtype:
            values = self._emit("cast", [values], x.shape, x.dtype, dtype=x.dtype)
        shape = (*mask.shape, *(1 for _ in x.shape[len(mask.shape) :]))
        made = self._emit("where", [self._reshaped(mask, shape), values, x], x.shape, x.dtype)
        self.unchanged.of[made] = x, rows.mask
        return made

    def _index_fill(self, node: fx.Node) -> Value | None:
        """``x.index_fill(dim, mask.nonzero(), number)`` along a dim that the mask is of."""
        x, index = self.lifter.read(node.args[0]), self.lifter.read(node.args[2])
        mask, value = self._places_of.get(index), node.args[3]
        dim: Any = node.args[1]
        if mask is None or isinstance(value, fx.Node) or x in self.rows:
            return None
        shape = tuple(n if d == dim % len(x.shape) else 1 for d, n in enumerate(x.shape))
        if math.prod(shape) != mask.shape[0]:
            return None
        wide = self._reshaped(mask, shape)
        return self._emit("masked_fill", [x, wide], x.shape, x.dtype, value=value)

    def _index_add(self, node: fx.Node) -> Value | None:
        """``x.index_add(dim, rows, y[mask])`` of the rows of a mask along that dim: a plain sum."""
        x, index, source = (self.lifter.read(node.args[i]) for i in (0, 2, 3))
        mask, rows = self._places_of.get(index), self.rows.get(source)
        dim: Any = node.args[1]
        if mask is None or rows is None or x in self.rows or node.kwargs.get("alpha", 1) != 1:
            return None
        same = (rows.mask, rows.dim, rows.inner) == (self._flattened(mask), dim % len(x.shape), 1)
        if not same or source.shape != x.shape or source.dtype != x.dtype:
            return None
        added = self._masked(source, rows, 0.0 if x.is_float else 0)
        made = self._emit("add", [x, added], x.shape, x.dtype)
        self.unchanged.of[made] = x, rows.mask
        return made

    def _cleaned(self, x: Value, rows: Rows) -> Value:
        one = {"bool": False}.get(x.dtype, 1.0 if x.is_float else 0)
        made = self._masked(x, rows, one)
        self.rows[made] = rows
        return made

    def _remember(self, node: fx.Node, made: Value | list[Value]) -> None:
        """The symbol of how many rows there are, and how many there can be."""
        metas: Any = node.meta["val"]
        values = made if isinstance(made, list) else [made]
        for value, meta in zip(values, metas if isinstance(made, list) else [metas], strict=True):
            rows, size = self.rows[value], meta.shape[0]
            if _is_open(size):
                self._most[_symbols(size)] = value.shape[0]
                self._masks[_symbols(size)] = rows.mask, rows.inner
        node.meta["val"] = self._filled(metas)

    # -- ops on all rows ---------------------------------------------------------------------------

    def _follow(self, node: Node) -> None:
        """Appends ``node``, with masks where it needs them, and says what has rows behind it."""
        given = [(i, rows) for i, v in enumerate(node.inputs) if (rows := self.rows.get(v))]
        if not given:
            self.lifter.nodes.append(node)
            return
        if len({rows.mask for _, rows in given}) > 1:
            raise self._refused(f"{node.kind} of rows that different masks have chosen")
        (place, rows), *_ = given
        dims = node.attrs.get("dims")
        if node.kind in _FILLED and dims is not None and rows.dim in _positive(dims, node):
            self._fill(node, [place], _FILLED[node.kind])
        elif node.kind == "mean" and rows.dim in _positive(dims or (), node):
            self._mean(node, rows)
        elif node.kind == "cross_entropy":
            self._ignore(node, dict(given))
        elif node.kind in _ADDING:
            places = [i for i, _ in given if node.inputs[i].is_float]
            if len(places) == 1 and places[0] > 0:  # to what stands before them
                self.unchanged.of[node.output] = node.inputs[0], rows.mask
            self._fill(node, places, 0.0)
        elif node.kind in ("softmax", "log_softmax") and node.attrs["dim"] == rows.dim:
            self._fill(node, [place], -math.inf)
            self.rows[node.output] = rows
        elif node.kind == "reshape":
            self._reshape(node, rows)
        else:
            self._by_rule(node, dict(given))

    def _by_rule(self, node: Node, given: dict[int, Rows]) -> None:
        bound = self._bound(node)
        factors = set()
        for place, rows in given.items():
            held = bound.operands[place][rows.dim]
            factors.add(next((f for f in held if bound.factors[f].size > 1), None))
        factor = next(iter(factors)) if len(factors) == 1 else None
        if factor is None or bound.factors[factor].kind == "whole":
            raise self._refused(node.kind)
        inner = {rows.inner for rows in given.values()}
        if len(inner) > 1 or any(entry.factor == factor for entry in bound.rule.internal):
            raise self._refused(node.kind)
        holders = [bound.holder(i, factor) for i in range(len(node.outputs))]
        if bound.factors[factor].kind == "summed" and all(d is None for d in holders):
            self._fill(node, [*given][:1], 0.0)
            return
        if any(d is None for d in holders):
            raise self._refused(node.kind)
        self.lifter.nodes.append(node)
        rows = next(iter(given.values()))
        for value, dim in zip(node.outputs, holders, strict=True):
            assert dim is not None
            self.rows[value] = replace(rows, dim=dim)

    def _bound(self, node: Node) -> BoundRule:
        names = {v: f"v{i}" for i, v in enumerate(dict.fromkeys((*node.inputs, *node.outputs)))}
        tensors = {n: Tensor(n, v.shape, v.dtype, "activation") for v, n in names.items()}
        op = Op(
            node.kind,
            tuple(names[v] for v in node.inputs),
            tuple(names[v] for v in node.outputs),
            node.attrs,
            node.source,
        )
        try:
            return bind(op, tensors)
        except UnruledOp:
            raise self._refused(node.kind) from None

    def _fill(self, node: Node, places: Iterable[int], value: Any) -> None:
        for place in places:
            x = node.inputs[place]
            if not x.is_float and isinstance(value, float) and math.isinf(value):
                limits = torch.iinfo(getattr(torch, x.dtype))
                value = limits.max if value > 0 else limits.min
            elif not x.is_float and x.dtype != "bool":
                value = int(value)
            node.inputs[place] = self._masked(x, self.rows[x], value)
        self.lifter.nodes.append(node)

    def _mean(self, node: Node, rows: Rows) -> None:
        (x,), (result,) = node.inputs, node.outputs
        dims = _positive(node.attrs["dims"], node)
        entries = math.prod(x.shape[d] for d in dims if d != rows.dim) * rows.inner
        total = self._emit("sum", [self._masked(x, rows, 0.0)], result.shape, result.dtype,
                           dims=node.attrs["dims"], keepdim=node.attrs["keepdim"])  # fmt: skip
        count = self._number(rows.mask, entries, result.dtype)
        self.lifter.nodes.append(Node("div", [total, count], [result], {}, node.source, node.grad))

    def _ignore(self, node: Node, given: dict[int, Rows]) -> None:
        """Labels that are left out are ignored; logits alone with rows cannot be."""
        ignored = node.attrs.get("ignore_index")
        if set(given) != {0, 1} or given[0] != given[1] or ignored is None:
            raise self._refused(node.kind)
        self._fill(node, [1], ignored)
        if node.output.shape:
            self.rows[node.output] = given[1]

    def _reshape(self, node: Node, rows: Rows) -> None:
        """The rows stay the outer part of a dim."""
        x, count = node.inputs[0], rows.mask.shape[0]
        before = math.prod(x.shape[: rows.dim])
        self.lifter.nodes.append(node)
        shape = node.output.shape
        for dim, size in enumerate(shape):
            whole = math.prod(shape[:dim]) == before and size % max(count, 1) == 0
            if whole and (size > 1 or count == 1):
                if x in self._places_of and node.output.shape == (count,):
                    self._places_of[node.output] = self._places_of[x]
                self.rows[node.output] = Rows(rows.mask, dim, size // max(count, 1))
                return
        raise self._refused("a shape that cuts them")

    # -- small parts -------------------------------------------------------------------------------

    def _masked(self, x: Value, rows: Rows, value: Any) -> Value:
        """x with ``value`` where the mask leaves rows out."""
        out = self._emit("not", [rows.mask], rows.mask.shape, "bool")
        count = rows.mask.shape[0]
        if rows.inner > 1:
            thin = self._reshaped(out, (count, 1))
            wide = (count, rows.inner)
            out = self._emit("expand", [thin], wide, "bool", shape=wide)
            out = self._reshaped(out, (count * rows.inner,))
        shape = tuple(n if d == rows.dim else 1 for d, n in enumerate(x.shape))
        out = self._reshaped(out, shape)
        return self._emit("masked_fill", [x, out], x.shape, x.dtype, value=value)

    def _count(self, symbols: Any) -> Value:
        """How many rows there are, as a number to compute with."""
        for symbol, (mask, inner) in self._masks.items():
            share = symbols / symbol
            if share.is_number:
                return self._number(mask, float(share) * inner, "float32")
            parts = list(symbols.args)
            if type(symbols).__name__ == "FloorDiv" and parts[0] == symbol:
                return self._number(mask, inner / float(parts[1]), "float32")
        raise self._refused("a number that is made of how many rows there are")

    def _number(self, mask: Value, times: float, dtype: str) -> Value:
        wide = self._emit("cast", [mask], mask.shape, dtype, dtype=dtype)
        made = self._emit("sum", [wide], (), dtype, dims=(0,), keepdim=False)
        return made if times == 1 else self._emit("mul", [made], (), dtype, other=times)

    def _flattened(self, mask: Value) -> Value:
        """In one dim; the same value for every shape of a mask."""
        mask = self._first_alike(mask)
        if mask not in self._flat:
            self._flat[mask] = self._reshaped(mask, (math.prod(mask.shape),))
        return self._flat[mask]

    def _first_alike(self, mask: Value) -> Value:
        """The first of equal masks: ``c == i`` may be written twice, and in several shapes."""
        while (made := self._maker(mask)) is not None and made.kind == "reshape":
            mask = made.inputs[0]
        if made is None or made.kind not in _MADE_AGAIN:
            return mask
        form = (made.kind, mask.shape, *map(self._first_alike, made.inputs), repr(made.attrs))
        return self._alike.setdefault(form, mask)

    def _reshaped(self, x: Value, shape: tuple[int, ...]) -> Value:
        return x if x.shape == shape else self._emit("reshape", [x], shape, x.dtype, shape=shape)

    def _emit(
        self, kind: str, inputs: Sequence[Value], shape: Sequence[int], dtype: str, /, **attrs: Any
    ) -> Value:
        return self.lifter.emit(kind, inputs, shape, dtype, **attrs)

    def _maker(self, value: Value) -> Node | None:
        return next((n for n in reversed(self.lifter.nodes) if value in n.outputs), None)

    def _static(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        expression: Any = size.node.expr.subs(self._most)
        if not expression.is_Integer:
            raise self._refused("a size that is made of how many rows there are")
        return int(expression)

    def _filled(self, meta: Any) -> Any:
        """Fakes as large as they can be, for what asks a node for its shape."""
        if isinstance(meta, list | tuple):
            return [self._filled(m) for m in meta]
        if not isinstance(meta, torch.Tensor) or not any(
            isinstance(n, torch.SymInt) for n in meta.shape
        ):
            return meta
        fake: Any = meta
        with fake.fake_mode:
            return torch.empty([self._static(n) for n in meta.shape], dtype=meta.dtype)

    def _refused(self, what: str) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"{self.lifter.source}: rows that a mask chooses, as in x[mask], meet {what}, where "
            "all of them would count: keep every row, and multiply by the mask or choose with "
            "torch.where"
        )


def _slice_of(node: fx.Node) -> tuple[int, int, int, int]:
    """dim, start, stop and step of a slice by numbers; a stop of -1 for another one."""
    given: Any = dict(zip(("self", "dim", "start", "end", "step"), node.args, strict=False))
    dim, start, stop, step = (given.get(n) for n in ("dim", "start", "end", "step"))
    numbers = (dim or 0, start or 0, stop, 1 if step is None else step)
    return numbers if all(isinstance(n, int) for n in numbers) else (0, 0, -1, 1)


def _is_open(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _symbols(size: Any) -> Any:
    return size.node.expr


def _positive(dims: Sequence[int], node: Node) -> set[int]:
    rank = len(node.inputs[0].shape)
    return {d % rank for d in dims} if rank else set()
