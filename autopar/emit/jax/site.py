"""One op at the place where JAX prints it: its operands as text, its sizes on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.emit.constants import literal
from autopar.emit.implementations import arguments
from autopar.emit.sizes import NONE, Sizes
from autopar.emit.text import ATOM, Expr, constant
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.graph import DTYPE_BYTES, Op
from autopar.rules.called import LIFTED
from autopar.rules.implementations.table import GLOBAL_COUNT

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """``x`` are the operands after their resharding, in order.

    result:          the shape of the first result on one rank.
    global_operands: the shapes of whole operands; ``operands``: on one rank, as the op reads them.
    beside:          what the call is given by how it runs (`autopar.emit.implementations`).
    counts_globally: whether a mean divides the sum of a piece by the count of the whole.
    """

    op: Op
    x: Sequence[Expr]
    lowered: Lowered
    result: Shape
    global_operands: Sequence[Shape]
    operands: Sequence[Shape]
    beside: Sequence[str]
    counts_globally: bool

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.op.attrs

    def call(self, function: str, *arguments: str) -> Expr:
        return Expr(f"{function}({', '.join(arguments)})", ATOM, weight=self.weight)

    def method(self, name: str, *arguments: str) -> Expr:
        return Expr(f"{self.x[0].atom}.{name}({', '.join(arguments)})", ATOM, weight=self.weight)

    @property
    def weight(self) -> int:
        return 1 + max((x.weight for x in self.x), default=0)

    def given(self, position: int = 0) -> str:
        return self.x[position].text

    def all_given(self) -> list[str]:
        return [x.text for x in self.x]

    def dtype(self, name: str = "dtype") -> str:
        dtype = str(self.attrs[name])
        return LIFTED.get(dtype) or literal(dtype)

    def constant(self, value: object) -> Expr:
        """A number among the operands, whose dtype it takes; JAX gives one of Python 32 bits and a
        sign before it looks at these, so a larger one says its dtype."""
        if isinstance(value, int) and not _FITS.start <= value < _FITS.stop:
            tensors = self.lowered.graph.tensors
            named = (*self.op.inputs[::-1], *self.op.outputs)
            whole = [d for n in named if "int" in (d := tensors[n].dtype)]
            return Expr(f"jnp.{whole[0]}({value})", ATOM) if whole else constant(value)
        return constant(value)

    @property
    def sums_in(self) -> str:
        """The name of the dtype in which a product adds up and gives its result, where that is
        wider than its operands' (JAX takes no narrower one); empty: theirs."""
        tensors = self.lowered.graph.tensors
        dtype = tensors[self.op.outputs[0]].dtype
        widest = max(DTYPE_BYTES[tensors[name].dtype] for name in self.op.inputs)
        return LIFTED.get(dtype) or literal(dtype) if DTYPE_BYTES[dtype] > widest else ""

    @property
    def preferred(self) -> list[str]:
        """The argument that says so."""
        return [f"preferred_element_type={self.sums_in}"] if self.sums_in else []

    @property
    def whole_dtype(self) -> str:
        """Of whole numbers, which jnp would widen where 64 bits are allowed, as where a program is
        verified: only what was captured fits what it meets. Nothing of others."""
        dtype = self.lowered.graph.tensors[self.op.outputs[0]].dtype
        return literal(dtype) if dtype.startswith(("int", "uint")) else ""


_FITS = range(-(1 << 31), 1 << 31)


def site_of(op: LoweredOp, inputs: Sequence[Expr], lowered: Lowered, sizes: Sizes = NONE) -> Site:
    """Where ``op`` stands, ``inputs`` being its operands. Raises `NoImplementation`."""
    whole = [sizes.whole(lowered, o.name) for o in op.operands]
    return Site(
        op=op.op,
        x=inputs,
        lowered=lowered,
        result=sizes.local(lowered, op.op.name, op.results[0]),
        global_operands=whole,
        operands=[sizes.local(lowered, o.name, o.wanted) for o in op.operands],
        beside=arguments(op, "jax", whole.__getitem__, lowered.order),
        counts_globally=GLOBAL_COUNT in op.implementations,
    )
