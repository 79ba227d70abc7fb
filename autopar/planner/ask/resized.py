"""The same cluster with more or fewer devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_models.slices import Slice, slice_of, written
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.errors import UserError
from autopar.nouns.level import Level, slowest_levels


class NoSuchCluster(UserError):
    """A number of devices that the cluster's levels cannot have."""


def resized(cluster: Cluster, devices: int) -> Cluster:
    """``cluster`` with so many devices: whole domains of every level but the outermost.

    Groups keep their shares where those are whole numbers, else all devices are of the kind that
    limits the cluster.

    Raises:
        NoSuchCluster: a domain would be filled in part.
    """
    if devices < 1:
        raise NoSuchCluster(f"{devices} devices: give a number from 1")
    total, groups = cluster.device_count, cluster.groups
    whole = all(group.count * devices % total == 0 for group in groups)
    if len(cluster.kinds) == 1 or not whole:
        levels = _resized(cluster, devices)
        if not whole:
            return replace(cluster, groups=(DeviceGroup(cluster.device, devices),), levels=levels)
        kept = [replace(g, count=g.count * devices // total, levels=()) for g in groups]
        return replace(cluster, groups=tuple(kept), levels=levels)
    counts = [group.count * devices // total for group in groups]
    views = [joined(group.levels or cluster.levels, devices, counts) for group in groups]
    own = any(view != views[0] for view in views)
    mixed = [
        replace(group, count=count, levels=view if own else ())
        for group, count, view in zip(groups, counts, views, strict=True)
    ]
    return replace(cluster, groups=tuple(mixed), levels=slowest_levels(views))


def joined(levels: Sequence[Level], devices: int, counts: Sequence[int]) -> tuple[Level, ...]:
    """``levels``, the last one joining so many ``devices``, the others inside each of ``counts``.

    Domains that are filled in part are taken as smaller ones that are full. Raises `NoSuchCluster`
    where a torus is not as large.
    """
    kept: list[Level] = []
    child = own = 1
    for level in levels[:-1]:
        span = math.gcd(level.span, *counts)
        if child < span < devices and not (level.topology == "torus" and span < level.span):
            kept.append(replace(level, span=span, ports=max(1, level.ports * child // own)))
            child = span
        own = level.span
    outer = replace(levels[-1], ports=max(1, levels[-1].ports * child // own))
    return (*kept, spanning(outer, devices))


def _resized(cluster: Cluster, devices: int) -> tuple[Level, ...]:
    levels = cluster.levels
    inside = [level for level in levels[:-1] if level.span < devices]
    for level in inside:
        if devices % level.span:
            less = devices // level.span * level.span
            raise NoSuchCluster(
                f"{devices} devices of {cluster.name} would fill a domain of {level.name} in part: "
                f"it has {level.span} devices; give {less} or {less + level.span}"
            )
    outer = levels[len(inside)]
    part = slice_of(cluster.device.name, outer)
    if part is None:
        return (*inside, spanning(outer, devices))
    return (*inside, _other_slice(outer, part, devices))


def _other_slice(level: Level, part: Slice, devices: int) -> Level:
    """``level`` as the links of the squarest slice of so many devices, which are whole chips."""
    kind = part.generation
    chips = devices // kind.devices_a_chip
    shape = kind.of_chips(chips)
    if shape is None:
        near = (f"{math.prod(s) * kind.devices_a_chip} ({written(s)})" for s in kind.nearest(chips))
        raise NoSuchCluster(
            f"no slice of TPU {kind.name} has {devices} devices; the nearest have {', '.join(near)}"
        )
    return replace(level, span=devices, torus_shape=shape, torus_wraps=kind.wraps(shape))


def spanning(level: Level, devices: int) -> Level:
    """``level`` as the outermost of so many devices.

    Raises `NoSuchCluster` where a torus cannot be that large along its slowest dimension."""
    shape = level.torus_shape
    if shape and devices != level.span:
        longest, left = divmod(shape[0] * devices, level.span)
        if left:
            raise NoSuchCluster(
                f"{devices} devices are no torus with {level.name}'s other dimensions, "
                f"{' x '.join(map(str, shape[1:])) or '1'}; give a multiple of their product"
            )
        shape = (longest, *shape[1:])
    return replace(level, span=devices, torus_shape=shape)
