"""What of one walk over a trace has rows that a mask chooses, and how such rows are masked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.skipped_check import Unchanged
from autopar.nouns.graph import Source

_MADE_AGAIN = frozenset("eq ne lt le gt ge not and or cast select slice transpose".split())
"""Kinds of which masks are made, and may be made again in the same way."""


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


class RowTable:
    """The rows of one walk.

    rows:      of each value that has such rows, which. places: where masks choose.
    masks:     by the symbol that says how many rows there are, with how often each row counts.
    most:      by symbol, how large it can be. places_of: of indices, the mask that they are of.
    unchanged: what is as before where a mask chooses no row.
    """

    def __init__(self, lifter: Walk) -> None:
        self.lifter = lifter
        self.rows: dict[Value, Rows] = {}
        self.places: list[str] = []
        self.masks: dict[Any, tuple[Value, int]] = {}
        self.unchanged = Unchanged(self.masks, self.first_alike)
        self.most: dict[Any, int] = {}
        self.places_of: dict[Value, Value] = {}
        self._flat: dict[Value, Value] = {}
        self._alike: dict[tuple[Any, ...], Value] = {}

    def masked(self, x: Value, rows: Rows, value: Any) -> Value:
        """x with ``value`` where the mask leaves rows out."""
        out = self.emit("not", [rows.mask], rows.mask.shape, "bool")
        count = rows.mask.shape[0]
        if rows.inner > 1:
            thin = self.reshaped(out, (count, 1))
            wide = (count, rows.inner)
            out = self.emit("expand", [thin], wide, "bool", shape=wide)
            out = self.reshaped(out, (count * rows.inner,))
        shape = tuple(n if d == rows.dim else 1 for d, n in enumerate(x.shape))
        out = self.reshaped(out, shape)
        return self.emit("masked_fill", [x, out], x.shape, x.dtype, value=value)

    def cleaned(self, x: Value, rows: Rows) -> Value:
        """x with the rows, in which those that are left out are ones."""
        one = {"bool": False}.get(x.dtype, 1.0 if x.is_float else 0)
        made = self.masked(x, rows, one)
        self.rows[made] = rows
        return made

    def count(self, symbols: Any) -> Value:
        """How many rows there are, as a number to compute with."""
        for symbol, (mask, inner) in self.masks.items():
            share = symbols / symbol
            if share.is_number:
                return self.number(mask, float(share) * inner, "float32")
            parts = list(symbols.args)
            if type(symbols).__name__ == "FloorDiv" and parts[0] == symbol:
                return self.number(mask, inner / float(parts[1]), "float32")
        raise self.refused("a number that is made of how many rows there are")

    def number(self, mask: Value, times: float, dtype: str) -> Value:
        wide = self.emit("cast", [mask], mask.shape, dtype, dtype=dtype)
        made = self.emit("sum", [wide], (), dtype, dims=(0,), keepdim=False)
        return made if times == 1 else self.emit("mul", [made], (), dtype, other=times)

    def flattened(self, mask: Value) -> Value:
        """In one dim; the same value for every shape of a mask."""
        mask = self.first_alike(mask)
        if mask not in self._flat:
            self._flat[mask] = self.reshaped(mask, (math.prod(mask.shape),))
        return self._flat[mask]

    def first_alike(self, mask: Value) -> Value:
        """The first of equal masks: ``c == i`` may be written twice, and in several shapes."""
        while (made := self.maker(mask)) is not None and made.kind == "reshape":
            mask = made.inputs[0]
        if made is None or made.kind not in _MADE_AGAIN:
            return mask
        form = (made.kind, mask.shape, *map(self.first_alike, made.inputs), repr(made.attrs))
        return self._alike.setdefault(form, mask)

    def reshaped(self, x: Value, shape: tuple[int, ...]) -> Value:
        return x if x.shape == shape else self.emit("reshape", [x], shape, x.dtype, shape=shape)

    def emit(
        self, kind: str, inputs: Sequence[Value], shape: Sequence[int], dtype: str, /, **attrs: Any
    ) -> Value:
        return self.lifter.emit(kind, inputs, shape, dtype, **attrs)

    def maker(self, value: Value) -> Node | None:
        return next((n for n in reversed(self.lifter.nodes) if value in n.outputs), None)

    def static(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        expression: Any = size.node.expr.subs(self.most)
        if not expression.is_Integer:
            raise self.refused("a size that is made of how many rows there are")
        return int(expression)

    def filled(self, meta: Any) -> Any:
        """Fakes as large as they can be, for what asks a node for its shape."""
        if isinstance(meta, list | tuple):
            return [self.filled(m) for m in meta]
        if not isinstance(meta, torch.Tensor) or not any(
            isinstance(n, torch.SymInt) for n in meta.shape
        ):
            return meta
        fake: Any = meta
        with fake.fake_mode:
            return torch.empty([self.static(n) for n in meta.shape], dtype=meta.dtype)

    def refused(self, what: str) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"{self.lifter.source}: rows that a mask chooses, as in x[mask], meet {what}, where "
            "all of them would count: keep every row, and multiply by the mask or choose with "
            "torch.where"
        )


def is_open(size: Any) -> bool:
    """Whether only the batch knows a size."""
    return isinstance(size, torch.SymInt)


def symbols_of(size: Any) -> Any:
    """An expression of the symbols of a trace, by which sizes are equal."""
    return size.node.expr
