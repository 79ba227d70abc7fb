"""Price of an all-reduce on two levels, as `runtime/pytorch/two_level.py` makes it.

    reduce-scatter inside a domain, all-reduce across domains of a piece, all-gather inside

Each is the price of the library's own collective on that sub-group, measured where a profile has
it. gloo has no reduce-scatter: pieces are exchanged, and added on the device. All sub-groups of an
axis run at once, and share what leaves a domain (`autopar.cost_models.collectives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.cost_models.collectives import AxisGroup, price
from autopar.cost_models.compute import added_time_s
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.pricing.units.moves import group_of


@dataclass(frozen=True, slots=True)
class SubGroups:
    """inside: ranks of a group in one domain. across: those of the same place in each domain."""

    inside: AxisGroup
    across: AxisGroup


def sub_groups(cluster: Cluster, group: AxisGroup) -> SubGroups | None:
    """A group cut at the domains below the outermost level that it crosses; None where that leaves
    one rank in each domain, where it lies in one, or where domains hold unequal numbers of it."""
    reach = group.size * group.stride
    below = [level.span for level in cluster.levels if level.span < reach]
    if not below or below[-1] % group.stride:
        return None
    inside = below[-1] // group.stride
    if inside < 2 or group.size % inside:
        return None
    return SubGroups(
        AxisGroup(inside, group.stride), AxisGroup(group.size // inside, group.stride * inside)
    )


@lru_cache(maxsize=4096)
def data_cut(cluster: Cluster, mesh: Mesh) -> SubGroups | None:
    """The ranks along all data axes of ``mesh``, cut so; None also where axes that do not split the
    batch lie between these."""
    axes = mesh.batch_axes
    if not axes or not are_neighbours(mesh, axes):
        return None
    return sub_groups(cluster, group_of(mesh, "+".join(axes)))


def are_neighbours(mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether ranks along ``axes`` are evenly spaced in rank order."""
    reach = sum((mesh.size(a) - 1) * mesh.stride(a) for a in axes)
    return reach == (mesh.ways(axes) - 1) * mesh.stride(axes[-1])


def two_level_time_s(cluster: Cluster, groups: SubGroups, size_bytes: float) -> float:
    """Seconds of the all-reduce of ``size_bytes`` on each rank."""
    if size_bytes <= 0:
        return 0.0
    ways = groups.inside.size
    across_s = price(cluster, "all_reduce", groups.across).time_s(size_bytes / ways)
    gather_s = price(cluster, "all_gather", groups.inside).time_s(size_bytes)
    return _scatter_s(cluster, groups.inside, size_bytes) + across_s + gather_s


def _scatter_s(cluster: Cluster, inside: AxisGroup, size_bytes: float) -> float:
    reach = inside.size * inside.stride
    level = next(level for level in cluster.levels if level.span >= reach)
    if level.library != "gloo":
        return price(cluster, "reduce_scatter", inside).time_s(size_bytes)
    exchanged_s = price(cluster, "all_to_all", inside).time_s(size_bytes)
    piece = size_bytes / inside.size
    return exchanged_s + (inside.size - 1) * added_time_s(cluster.device, piece)
