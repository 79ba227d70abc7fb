"""One op at the place where it is printed: its operands as text, its sizes on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.emit.sizes import NONE, Sizes
from autopar.emit.text import Expr, constant
from autopar.lowering.lowered import SAMPLE_AXES, Lowered, LoweredOp
from autopar.nouns.axes import SLICE
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding

Printer = Callable[["Site"], Expr]

HEAVY = 2  # weight of an op that a reader looks at by itself: a product, a norm, a call
LIGHT = 1
HIGHEST = 3.4028234663852886e38  # of float32; masks are filled with its opposite


class EmitError(ValueError):
    """A plan asks for something that the emitter cannot print; a bug of the planner or emitter."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the runtime that holds parameters: its class, their names, its other arguments."""

    kind: str
    held: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """``args`` are the operands after their resharding, in order.

    ``count`` is the text of the global count that a mean divides by; ``half`` the dtype of compute
    where it is a half precision. ``layer(path, layer)``: whether the module at ``path`` is that
    layer, from here on. ``named``: the sizes that follow from the batch. ``define(hint, text)``:
    the name of a function before the classes, from its arguments on ``text``. ``beside``: what the
    call is given by how it runs (`autopar.emit.implementations`). ``attribute(path)``: text for a
    module of the graph.
    """

    lowered: Lowered
    at: LoweredOp
    args: tuple[Expr, ...]
    bias: Expr | None = None
    count: str = ""
    half: str = ""
    layer: Callable[[str, Layer], bool] = lambda path, layer: False
    named: Sizes = NONE
    define: Callable[[str, str], str] = lambda hint, text: hint
    beside: Sequence[str] = ()
    attribute: Callable[[str], str] = lambda path: f"self.{path}"

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.at.op.attrs

    @property
    def kind(self) -> str:
        return self.at.op.kind

    @property
    def mesh(self) -> Mesh:
        return self.lowered.mesh

    def constant(self, value: object) -> Expr:
        """A scalar; float32's lowest and highest number are infinite in bfloat16."""
        if isinstance(value, float) and abs(value) == HIGHEST:
            end = "min" if value < 0 else "max"
            return Expr(f"torch.finfo(torch.{self.half or 'float32'}).{end}")
        return constant(value)

    def number(self, value: object) -> str:
        """`constant` as an argument."""
        return self.constant(value).text

    def whole(self, operand: int) -> tuple[int, ...]:
        """Global shape of an operand."""
        return self.named.whole(self.lowered, self.at.op.inputs[operand])

    def operand(self, operand: int) -> tuple[int, ...]:
        """Shape of an operand on one rank."""
        at = self.at.operands[operand]
        return self.named.local(self.lowered, self.at.op.inputs[operand], at.wanted)

    def result(self, result: int = 0) -> tuple[int, ...]:
        """Shape of a result on one rank (the larger piece of an uneven split)."""
        name = self.at.op.outputs[result]
        return self.named.local(self.lowered, name, self.at.results[result])

    def sizes(self, result: int = 0) -> tuple[int, ...]:
        """`result` with -1 for a dim whose pieces differ in size."""
        tensor = self.lowered.graph.tensors[self.at.op.outputs[result]]
        uneven = uneven_dims(self.at.results[result], tensor.shape, self.mesh)
        if len(uneven) > 1:
            raise EmitError(f"{self.at.op.name}: dims {uneven} are both split unevenly")
        return tuple(-1 if d in uneven else n for d, n in enumerate(self.result(result)))

    def operand_sizes(self, operand: int) -> tuple[int, ...]:
        """`operand` with -1 for a dim whose pieces differ in size."""
        uneven = uneven_dims(self.at.operands[operand].wanted, self.whole(operand), self.mesh)
        return tuple(-1 if d in uneven else n for d, n in enumerate(self.operand(operand)))

    def role(self, name: str) -> str:
        """``parameter``, ``buffer``, ``activation``, ..."""
        return self.lowered.graph.tensors[name].role

    def pieces(self, operand: int) -> frozenset[int]:
        """Dims of an operand that model axes split."""
        placements = model_part(self.at.operands[operand].wanted).placements
        return frozenset(placed.dim for _, placed in placements if placed.kind == "S")

    def drawn_apart(self, result: int = 0, dims: int | None = None) -> tuple[str, ...]:
        """Model axes that split a result, or its first ``dims`` dims: their ranks drop apart. So
        do slices, each of which has random numbers of its own."""
        placements = self.at.results[result].placements
        return tuple(
            axis
            for axis, placement in placements
            if axis not in (SLICE, *SAMPLE_AXES)
            and placement.kind == "S"
            and (dims is None or placement.dim < dims)
        )

    def splits(self, operand: int, dims: tuple[int, ...]) -> bool:
        """Whether anything, microbatches included, splits one of ``dims`` of an operand."""
        return any(self.at.operands[operand].wanted.split_axes(d) for d in dims)


def uneven_dims(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> list[int]:
    """The dims whose pieces are not all of one size."""
    dims = []
    for dim, size in enumerate(shape):
        ways = 1
        for axis in sharding.split_axes(dim):
            ways *= mesh.size(axis)
        if size % ways:
            dims.append(dim)
    return dims


def model_part(sharding: Sharding) -> Sharding:
    """The placements on axes that do not split samples."""
    return Sharding(tuple((a, p) for a, p in sharding.placements if a not in SAMPLE_AXES))


def dtype(name: str) -> str:
    """``float32`` is the variable that verification lifts."""
    return "FP32" if name == "float32" else f"torch.{name}"
