"""How one tensor lies on a mesh, and how its gradient does.

Per mesh axis a tensor has one *placement*, and a placement fixes both directions:

====  =====================================  =======================================
text  the tensor on the ranks of the axis    its gradient on the ranks of the axis
====  =====================================  =======================================
Sd    split along dim d                      split along dim d
R     whole on every rank                    whole on every rank
D     whole on every rank                    deferred: a partial sum on each rank
P     a partial sum on each rank             whole on every rank
====  =====================================  =======================================

``D`` is what an operand has when the axis splits a factor of its consumer that the operand lacks:
the input of a column-parallel linear, or a parameter under data parallelism. It is the adjoint of
``P``. Axes that a `Sharding` does not mention are ``R``. A dim split by several axes is split by
the outermost mesh axis first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from autopar.nouns.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Placement:
    """One of ``Sd``, ``R``, ``D``, ``P``; ``dim`` is -1 except for ``S``.

    ``zigzag``: a rank's piece is not contiguous (`autopar.rules.cut`), ``Sdz``. It follows from the
    cut of the batch, so decisions do not say it; a program does.
    """

    kind: str
    dim: int = -1
    zigzag: bool = False

    def __str__(self) -> str:
        return f"S{self.dim}{'z' * self.zigzag}" if self.kind == "S" else self.kind

    @staticmethod
    def parse(text: str) -> Placement:
        if text in ("R", "D", "P"):
            return Placement(text)
        dim = text[1:].removesuffix("z")
        if text.startswith("S") and dim.isdigit():
            return Placement("S", int(dim), zigzag=True) if text[-1] == "z" else split(int(dim))
        raise ValueError(f"placement {text!r} is none of R, D, P, S<dim>, S<dim>z")


WHOLE = Placement("R")
DEFERRED = Placement("D")
PARTIAL = Placement("P")


@cache
def split(dim: int) -> Placement:
    return Placement("S", dim)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Placements by axis, as ``((axis, placement), ...)`` in mesh order; ``R`` is left out."""

    placements: tuple[tuple[str, Placement], ...] = ()

    @staticmethod
    def of(pairs: Iterable[tuple[str, Placement]]) -> Sharding:
        return Sharding(tuple([(a, p) for a, p in pairs if p.kind != "R"]))

    def on(self, axis: str) -> Placement:
        for name, placement in self.placements:
            if name == axis:
                return placement
        return WHOLE

    def with_placement(self, mesh: Mesh, axis: str, placement: Placement) -> Sharding:
        return Sharding.of((a, placement if a == axis else self.on(a)) for a in mesh.axes)

    def split_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that split ``dim``, outermost first."""
        return tuple(a for a, p in self.placements if p.kind == "S" and p.dim == dim)

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Largest shape that any rank holds; uneven splits round up as ``torch.chunk`` does."""
        local = list(shape)
        for axis, placement in self.placements:
            if placement.kind == "S":
                local[placement.dim] = -(-local[placement.dim] // mesh.size(axis))
        return tuple(local)

    def __str__(self) -> str:
        return " ".join(f"{a}:{p}" for a, p in self.placements) or "R"

    @staticmethod
    def parse(text: str) -> Sharding:
        if text == "R":
            return Sharding()
        pairs = (part.split(":") for part in text.split())
        return Sharding(tuple((axis, Placement.parse(p)) for axis, p in pairs))
