"""The same cluster with more or fewer devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.nouns.cluster import Cluster, DeviceGroup, Level
from autopar.nouns.errors import UserError


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
    total, levels = cluster.device_count, _resized(cluster, cluster.levels, devices)
    groups: tuple[DeviceGroup, ...] = (DeviceGroup(cluster.device, devices),)
    if all(group.count * devices % total == 0 for group in cluster.groups):
        groups = tuple(
            replace(
                group,
                count=group.count * devices // total,
                levels=_resized(cluster, group.levels, devices) if group.levels else (),
            )
            for group in cluster.groups
        )
    return replace(cluster, groups=groups, levels=levels)


def _resized(cluster: Cluster, levels: Sequence[Level], devices: int) -> tuple[Level, ...]:
    inside = [level for level in levels[:-1] if level.span < devices]
    for level in inside:
        if devices % level.span:
            less = devices // level.span * level.span
            raise NoSuchCluster(
                f"{devices} devices of {cluster.name} would fill a domain of {level.name} in part: "
                f"it has {level.span} devices; give {less} or {less + level.span}"
            )
    return (*inside, spanning(levels[len(inside)], devices))


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
