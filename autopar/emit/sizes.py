"""Sizes that follow from the batch: which dims have them, and what a program calls them.

Every dim of a tensor is a product of *origins*: the samples of the batch, the length of its rows of
ids, or one without a name. Origins follow from rules alone: a factor of an op is the same index in
every operand and result that has it. Numbers that are equal by chance have different origins, and a
dim whose origins are not known is a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.emit.names import identifier
from autopar.emit.text import Lines
from autopar.lowering.lowered import SAMPLE_AXES, Lowered, LoweredOp
from autopar.nouns.axes import MICROBATCH, SLICE
from autopar.nouns.batch import BatchEntry
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.sharding import Sharding

GLOBAL, LOCAL, LENGTH = "GLOBAL_BATCH", "LOCAL_BATCH", "SEQUENCE"
Shape = tuple[int, ...]
Product = tuple[int, ...]
"""Origins of a dim, major first, by their numbers; nothing for a dim of one."""


class Size(int):
    """A number that is written as an expression of the names at the top of the program."""

    text: str

    def __new__(cls, value: int, text: str) -> Size:
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    @property
    def factor(self) -> str:
        """The text as an operand of a product or of a division."""
        return f"({self.text})" if " " in self.text else self.text


def product(sizes: Iterable[int]) -> int:
    """Of several sizes; one that has a name keeps it."""
    factors = [size for size in sizes if size != 1]
    value = math.prod(factors)
    if not any(isinstance(size, Size) for size in factors):
        return value
    if len(factors) == 1:
        return factors[0]
    texts = [
        size.factor if isinstance(size, Size) and "/" in size.text else str(size)
        for size in factors
    ]
    return Size(value, " * ".join(texts))


def ways_of(axis: str) -> str:
    """Into how many pieces an axis cuts, as the text has it."""
    return "SETTINGS.seq_slices" if axis == SLICE else f'MESH["{axis}"]'


def slice_end(stop: int, size: int) -> str:
    """The end of a slice: nothing for all, -1 for all but the last."""
    if isinstance(stop, Size) or stop < size - 1 or size < 3:
        return "" if stop >= size else str(stop)
    return "-1" if stop == size - 1 else ""


@dataclass(slots=True)
class _Origins:
    """Numbers of origins, joined where they turn out to be one."""

    sizes: list[int] = field(default_factory=list)
    _joined: list[int] = field(default_factory=list)

    def fresh(self, size: int) -> Product:
        if size == 1:
            return ()
        self.sizes.append(size)
        self._joined.append(len(self._joined))
        return (len(self._joined) - 1,)

    def root(self, origin: int) -> int:
        while self._joined[origin] != origin:
            origin = self._joined[origin]
        return origin

    def join(self, one: Product, other: Product) -> None:
        """The same extent by two names: what is left of both without what they share is one."""
        left, right = [self.root(o) for o in one], [self.root(o) for o in other]
        for origin in [*left]:
            if origin in right:
                left.remove(origin)
                right.remove(origin)
        if len(left) == len(right) == 1 and self.sizes[left[0]] == self.sizes[right[0]]:
            first, second = sorted((left[0], right[0]))
            self._joined[second] = first


@dataclass(frozen=True, slots=True)
class Sizes:
    """dims: origins of every dim by tensor key. names: of origins. values: of lengths, by name.

    mesh: with its ``microbatch`` axis, as lowering has it.
    """

    mesh: Mesh
    samples: int = 0
    dims: Mapping[str, tuple[Product, ...]] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    extents: Sequence[int] = ()

    @staticmethod
    def of(lowered: Lowered, batch: Sequence[BatchEntry]) -> Sizes:
        """Of a whole model, with every block that it calls."""
        samples = next((e.shape[e.batch_dim] for e in batch if e.batch_dim is not None), 0)
        flow = _Flow(_Origins(), {})
        (together,) = flow.origins.fresh(samples) or (-1,)
        lengths: dict[str, int] = {}
        for entry in batch:
            if entry.name not in lowered.graph.tensors:
                continue
            dims = [flow.origins.fresh(size) for size in entry.shape]
            if entry.batch_dim is not None:
                dims[entry.batch_dim] = (together,) if together >= 0 else ()
                rest = [d for i, d in enumerate(dims) if d and i != entry.batch_dim]
                if len(rest) == 1 and "int" in entry.dtype:
                    lengths[entry.name] = rest[0][0]
            flow.dims[key(None, entry.name)] = dims
        flow.follow(lowered)
        origins = flow.origins
        names = {origins.root(together): GLOBAL} if together >= 0 else {}
        equal = len({origins.sizes[origin] for origin in lengths.values()}) == 1
        for name, origin in lengths.items():
            own = f"{identifier(name).upper()}_LENGTH"
            first = equal and LENGTH not in names.values()
            names.setdefault(origins.root(origin), LENGTH if first else own)
        resolved = {
            name: tuple(flow.resolved(dim) for dim in every) for name, every in flow.dims.items()
        }
        values = {name: origins.sizes[o] for o, name in names.items() if name != GLOBAL}
        return Sizes(lowered.mesh, samples, resolved, names, values, origins.sizes)

    def local(self, lowered: Lowered, name: str, sharding: Sharding) -> Shape:
        """The shape of a tensor on one rank, with the sizes that have names under them."""
        shape = sharding.local_shape(lowered.graph.tensors[name].shape, lowered.mesh)
        dims = self.dims.get(key(lowered.block, name), ())
        if len(dims) != len(shape):
            return shape
        return tuple(
            self._named(value, dim, sharding.split_axes(d))
            for d, (value, dim) in enumerate(zip(shape, dims, strict=True))
        )

    def whole(self, lowered: Lowered, name: str) -> Shape:
        """The same of the whole tensor."""
        return self.local(lowered, name, Sharding())

    def _named(self, value: int, dim: Product, axes: Sequence[str]) -> int:
        texts, rest, batch = [], 1, False
        for origin in dim:
            name = self.names.get(origin, "")
            if name == GLOBAL:
                batch = True
                name = LOCAL if any(a in SAMPLE_AXES for a in axes) else GLOBAL
            if name:
                texts.append(name)
            else:
                rest *= self.extents[origin]
        cut = [axis for axis in axes if axis in SAMPLE_AXES]
        every = [axis for axis in SAMPLE_AXES if self.mesh.size(axis) > 1]
        if not texts or (cut and not (batch and cut == every)):
            return value
        beside = [axis for axis in axes if axis not in SAMPLE_AXES]
        ways = math.prod(self.mesh.size(axis) for axis in beside)
        if rest % ways == 0:
            rest, beside = rest // ways, []
        text = " * ".join([*texts, *([str(rest)] if rest > 1 else [])])
        text += "".join(f" // {ways_of(axis)}" for axis in beside)
        numbers = {GLOBAL: self.samples, LOCAL: self._samples_here, **self.values}
        written = math.prod(numbers[t] for t in texts) * rest
        for axis in beside:
            written //= self.mesh.size(axis)
        return Size(value, text) if written == value else value

    @property
    def _samples_here(self) -> int:
        return self.samples // math.prod(self.mesh.size(axis) for axis in SAMPLE_AXES)

    def lines(self, body: str) -> list[str]:
        """Assignments of the names that ``body`` reads."""
        used = {name for name in (GLOBAL, LOCAL, *self.values) if re.search(rf"\b{name}\b", body)}
        ways = [f'MESH["{axis}"]' for axis in self.mesh.sample_axes]
        if self.mesh.size(MICROBATCH) > 1:
            ways = ["SETTINGS.microbatches", *ways]
        lines = Lines(0)
        if LOCAL in used and not ways:
            lines.add(f"{LOCAL} = {self.samples}", "samples")
        elif used & {GLOBAL, LOCAL}:
            lines.add(f"{GLOBAL} = {self.samples}", "samples")
        if LOCAL in used and ways:
            here = f"samples of a microbatch on one rank: {self._samples_here}"
            lines.add(f"{LOCAL} = {' // '.join([GLOBAL, *ways])}", here, above=True)
        for name in self.values:
            of = "sample" if name == LENGTH else f"row of {name.removesuffix('_LENGTH').lower()}"
            if name in used:
                lines.add(f"{name} = {self.values[name]}", f"tokens of a {of}")
        return lines.lines


@dataclass(slots=True)
class _Flow:
    """What is known after the ops so far.

    dims:  of tensors, by key. A block has origins of its own, whoever calls it.
    calls: by origin of a block's input, what it is in each call.
    """

    origins: _Origins
    dims: dict[str, list[Product]]
    calls: dict[int, list[Product]] = field(default_factory=dict)

    def resolved(self, dim: Product) -> Product:
        """With what all callers of a block agree on in place of the block's own origins."""
        made: list[int] = []
        for origin in map(self.origins.root, dim):
            given = {self.resolved(outer) for outer in self.calls.get(origin, ())}
            made += next(iter(given)) if len(given) == 1 else (origin,)
        return tuple(made)

    def follow(self, lowered: Lowered) -> None:
        """All ops of a graph in order, and of the blocks that they call."""
        for tensor in lowered.graph.tensors.values():
            if tensor.role in ("parameter", "buffer", "input"):
                self._known(key(lowered.block, tensor.name), tensor.shape)
        for op in lowered.ops:
            if op.bound is None:
                self._call(op, lowered)
            else:
                self._op(op, lowered)

    def _known(self, name: str, shape: Shape) -> list[Product]:
        if name not in self.dims:
            self.dims[name] = [self.origins.fresh(size) for size in shape]
        return self.dims[name]

    def _call(self, op: LoweredOp, lowered: Lowered) -> None:
        body = lowered.blocks[op.op.attrs["block"]]
        if any(key(body.block, name) not in self.dims for name in body.graph.outputs):
            self.follow(body)
        given: dict[int, Product] = {}
        for name, outer in zip(body.graph.inputs, op.op.inputs, strict=True):
            dims = self._known(key(lowered.block, outer), lowered.graph.tensors[outer].shape)
            inner = self._known(key(body.block, name), body.graph.tensors[name].shape)
            for one, other in zip(inner, dims, strict=True):
                if one:  # an origin of the block, or of several of its inputs
                    self.origins.join(given.setdefault(self.origins.root(one[0]), other), other)
        for origin, outside in given.items():
            known = self.calls.setdefault(origin, [])
            known += [outside] if outside not in known else []
        for name, result in zip(body.graph.outputs, op.op.outputs, strict=True):
            made: list[Product] = []
            for dim in self.dims[key(body.block, name)]:
                for origin in map(self.origins.root, dim):
                    if origin not in given:
                        given[origin] = self.origins.fresh(self.origins.sizes[origin])
                made.append(tuple(o for i in map(self.origins.root, dim) for o in given[i]))
            self.dims[key(lowered.block, result)] = made

    def _op(self, op: LoweredOp, lowered: Lowered) -> None:
        assert op.bound is not None
        extents = {name: factor.size for name, factor in op.bound.factors.items()}
        of_factor: dict[str, Product] = {}
        for term, name in zip(op.bound.operands, op.op.inputs, strict=True):
            dims = self._known(key(lowered.block, name), lowered.graph.tensors[name].shape)
            for factors, dim in zip(term, dims, strict=True):
                for factor, origins in self._dealt(factors, dim, extents):
                    self.origins.join(of_factor.setdefault(factor, origins), origins)
        for term, name in zip(op.bound.results, op.op.outputs, strict=True):
            made: list[Product] = []
            for factors in term:
                for factor in factors:
                    if factor not in of_factor:
                        of_factor[factor] = self.origins.fresh(extents[factor])
                made.append(tuple(o for factor in factors for o in of_factor[factor]))
            self.dims[key(lowered.block, name)] = made

    def _dealt(
        self, factors: Sequence[str], dim: Product, extents: Mapping[str, int]
    ) -> Iterator[tuple[str, Product]]:
        """The origins of a dim to the factors whose products they are, as far as that goes."""
        left = [*dim]
        for factor in (f for f in factors if extents[f] != 1):
            own: list[int] = []
            while left and math.prod(self.origins.sizes[o] for o in own) < extents[factor]:
                own.append(left.pop(0))
            if math.prod(self.origins.sizes[o] for o in own) != extents[factor]:
                return
            yield factor, tuple(own)


NONE = Sizes(Mesh((), ()))
"""Of a graph of which nothing is known: numbers."""
