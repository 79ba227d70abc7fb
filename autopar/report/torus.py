"""Which dims of a torus the axes of a plan lie on, and what that does to their collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.cost_models.collectives import OnTorus, on_torus
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.nouns.scatters import FIRST, THEN
from autopar.pricing.units.moves import group_of
from autopar.report.render import indented


@dataclass(frozen=True, slots=True)
class AxisOnTorus:
    """An axis, or several as one group (``dp_shard+cp``), and what lies under it.

    scatters: the plan has reduce-scatters over it.
    """

    axis: str
    ranks: int
    place: OnTorus
    scatters: bool

    def __str__(self) -> str:
        level = self.place.level
        torus = "x".join(map(str, level.torus_shape))
        dims = [_dim(one.extent, level.torus_shape[one.dim], one.ring) for one in self.place.dims]
        text = f"{self.axis} {self.ranks}: {' and '.join(dims)} of {level.name} {torus}"
        if not (self.scatters and self.place.whole):
            return text
        if first := self.place.first:
            return (
                f"{text}; its reduce-scatters are two, over {first} ranks and over the "
                f"{self.ranks // first} left: the compiler would make an all-reduce of one"
            )
        return (
            f"{text}; the compiler makes all-reduces of its reduce-scatters, twice the bytes, and "
            "they are priced so"
        )


def axes_on_torus(
    cluster: Cluster, mesh: Mesh, rows: Sequence[Mapping[str, Any]]
) -> list[AxisOnTorus]:
    """Every axis that the collectives of a step (``collectives.json``) go over on a torus."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        whole = row["axis"].removesuffix(FIRST).removesuffix(THEN)
        if all(axis in mesh.axes for axis in whole.split("+")):
            kinds.setdefault(whole, set()).add(row["kind"])
    lying = []
    for axis, moved in kinds.items():
        group = group_of(mesh, axis)
        place = on_torus(cluster, group)
        if place is not None:
            lying.append(AxisOnTorus(axis, group.size, place, "reduce_scatter" in moved))
    return lying


def torus_lines(lying: Sequence[AxisOnTorus]) -> list[RenderableType]:
    """Lines of `autopar explain`."""
    title = Text("Where the axes lie on the torus", style="bold")
    return [title, *(indented(Text(str(one))) for one in lying), Text()]


def torus_object(lying: Sequence[AxisOnTorus]) -> list[dict[str, Any]]:
    """What `autopar explain --json` has of it."""
    return [
        {
            "axis": one.axis,
            "ranks": one.ranks,
            "level": one.place.level.name,
            "dims": [
                {"dim": dim.dim, "extent": dim.extent, "ring": dim.ring, "shared": dim.shared}
                for dim in one.place.dims
            ],
            "reduce_scatter_is_all_reduce": one.place.whole and not one.place.first,
            "reduce_scatter_in_two": one.place.first,
        }
        for one in lying
    ]


def _dim(extent: int, size: int, ring: bool) -> str:
    part = "a dim" if extent == size else f"{extent} of a dim"
    return f"{part} of {size} ({'a ring' if ring else 'a line'})"
