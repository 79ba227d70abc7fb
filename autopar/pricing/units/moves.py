"""Seconds of a collective on an axis of a mesh."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import cast

from autopar.cost_models.collectives import AxisGroup, Kind, measured, price
from autopar.cost_models.rates import fitted
from autopar.nouns.buckets import BUCKET_BYTES
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.rules.resharding import SHIFT

_HELD = {
    True: {"all_gather": "unit_gather", "reduce_scatter": "unit_reduce"},
    False: {"all_reduce": "bucket_reduce"},
}
"""What FSDP2 (True) and DDP (False) make of a collective, as profiles call it."""


def contention_of(cluster: Cluster) -> float:
    """What a second of communication takes of the compute that hides it: they share cores and
    memory. As a profile measured it; without one what published runs on accelerators were fitted
    with."""
    level = cluster.levels[-1]
    if level.measured or level.contention or level.library == "gloo":
        return level.contention
    return fitted()["contention"]


def state_time_s(
    cluster: Cluster, mesh: Mesh, fsdp: bool, kind: str, axis: str, size_bytes: float
) -> float:
    """A collective of parameters or gradients over a data axis, with the framework's copies where
    a profile has measured them."""
    group = group_of(mesh, axis)
    known = measured(cluster, _HELD[fsdp].get(kind, kind), group)
    if known is not None:
        return known.time_s(size_bytes)
    return move_time_s(cluster, mesh, kind, axis, size_bytes)


def before_counts(cluster: Cluster, mesh: Mesh, axis: str, bucket_bytes: int) -> bool:
    """Whether `bucket_time_s` hangs on what has gone before."""
    known = measured(cluster, "bucket_reduce", group_of(mesh, axis))
    return known is not None and bucket_bytes == BUCKET_BYTES


def bucket_time_s(
    cluster: Cluster,
    mesh: Mesh,
    axis: str,
    before_bytes: float,
    size_bytes: float,
    bucket_bytes: int = BUCKET_BYTES,
) -> float:
    """DDP's reduction of ``size_bytes`` of gradients when ``before_bytes`` have gone already.

    Profiles measure buckets of `BUCKET_BYTES`.
    """
    group = group_of(mesh, axis)
    known = measured(cluster, "bucket_reduce", group)
    if known is not None and bucket_bytes == BUCKET_BYTES:
        return known.time_s(before_bytes + size_bytes) - known.time_s(before_bytes)

    def one_s(size: float) -> float:
        if known is not None:
            return known.time_s(size) if size else 0.0
        return move_time_s(cluster, mesh, "all_reduce", axis, size)

    full, rest = divmod(size_bytes, bucket_bytes)
    return full * one_s(bucket_bytes) + one_s(rest)


def move_time_s(cluster: Cluster, mesh: Mesh, kind: str, axis: str, size_bytes: float) -> float:
    """One collective over every group of ``axis`` at once; ``size_bytes`` is its full-size side."""
    known = cast(Kind, "p2p" if kind == SHIFT else kind)
    return price(cluster, known, group_of(mesh, axis)).time_s(size_bytes)


@lru_cache(maxsize=4096)
def group_of(mesh: Mesh, axis: str) -> AxisGroup:
    """The ranks of an axis, or of several as one group: ``"dp_replicate+dp_shard"``.

    Of axes that are no neighbours in the mesh, as many ranks evenly spread over as wide a range.
    """
    axes = axis.split("+")
    ranks = math.prod(mesh.size(a) for a in axes)
    reach = sum((mesh.size(a) - 1) * mesh.stride(a) for a in axes)
    outer = next((n for n in map(mesh.size, axes) if n > 1), 0)
    stride = reach // (ranks - 1) if ranks > 1 else 1
    return AxisGroup(ranks, stride, outer if outer < ranks else 0)
