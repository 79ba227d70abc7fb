"""A cluster's devices as people read them."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.nouns.cluster import Cluster, DeviceGroup


def devices_text(groups: Iterable[DeviceGroup]) -> str:
    """``8 x A100, 8 x H100``"""
    return ", ".join(f"{group.count} x {group.device.name}" for group in groups)


def ranks_text(cluster: Cluster) -> str:
    """``ranks 0 to 7 on H100, 8 to 15 on A100-80GB``"""
    parts, first = [], 0
    for group in cluster.groups:
        last = first + group.count - 1
        parts.append(f"{f'{first} to {last}' if last > first else first} on {group.device.name}")
        first = last + 1
    return f"ranks {', '.join(parts)}"
