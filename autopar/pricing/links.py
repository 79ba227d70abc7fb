"""What the ranks of a pipeline send over: near links inside a domain, far ones between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.collectives import AxisGroup, price
from autopar.nouns.cluster import Cluster

Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Link:
    """Devices of a stage to their like in another, over links of one kind.

    group: stages of a pipeline as long as these links join.
    """

    cluster: Cluster
    group: AxisGroup

    def time_s(self, size_bytes: float) -> float:
        return price(self.cluster, "p2p", self.group).time_s(size_bytes)


@dataclass(frozen=True, slots=True)
class Links:
    """``between``: [ranks, ranks] place in ``kinds`` of what two pipeline ranks send over."""

    kinds: tuple[Link, ...]
    between: Places


@lru_cache(maxsize=256)
def links(cluster: Cluster, ranks: int, apart: int) -> Links:
    """Links of pipeline ranks, each of the ``apart`` devices behind those of the one before it.

    Two ranks send over the innermost level that joins all devices of both; inside one kind of
    devices with the levels of that kind.
    """
    first = np.arange(ranks) * apart
    low, high = np.minimum.outer(first, first), np.maximum.outer(first, first) + apart - 1
    options: list[Link] = []
    chosen = np.full((ranks, ranks), -1, dtype=np.intp)
    for start, end, view in _views(cluster):
        inside = (low >= start) & (high < end)
        for level in view.levels:
            near = (low - start) // level.span == (high - start) // level.span
            joined = (chosen < 0) & inside & near
            if joined.any():
                chosen[joined] = len(options)
                far = max(1, min(ranks, level.span // apart))
                options.append(Link(view, AxisGroup(far, apart)))
    kinds: dict[tuple[object, ...], Link] = {}
    same = [(link.cluster.levels, link.group) for link in options]
    for key, link in zip(same, options, strict=True):
        kinds.setdefault(key, link)
    place = np.array([[*kinds].index(key) for key in same], dtype=np.intp)
    return Links(tuple(kinds.values()), place[chosen])


def _views(cluster: Cluster) -> Iterator[tuple[int, int, Cluster]]:
    """(first rank, the one behind the last, how they are joined), all of the cluster last."""
    runs: list[tuple[int, int, Cluster]] = []
    start = 0
    for group in cluster.groups if len(cluster.kinds) > 1 else ():
        view = cluster.alike(start, group.count)
        first = runs.pop()[0] if runs and runs[-1][2] is view else start
        start += group.count
        runs.append((first, start, view))
    yield from runs
    yield 0, cluster.device_count, cluster
