"""Seconds of a collective on an axis of a mesh."""

from __future__ import annotations

from typing import cast

from autopar.cost_models.collectives import AxisGroup, Kind, price
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh


def move_time_s(cluster: Cluster, mesh: Mesh, kind: str, axis: str, size_bytes: float) -> float:
    """One collective over every group of ``axis`` at once; ``size_bytes`` is its full-size side."""
    group = AxisGroup(mesh.size(axis), mesh.stride(axis))
    return price(cluster, cast(Kind, kind), group).time_s(size_bytes)
