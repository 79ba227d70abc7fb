"""Seconds of one collective, for the tests of their prices."""

from __future__ import annotations

from autopar.cost_models.collectives import AxisGroup, Kind, price
from autopar.nouns.cluster import Cluster


def collective_time_s(cluster: Cluster, kind: Kind, size_bytes: float, group: AxisGroup) -> float:
    return price(cluster, kind, group).time_s(size_bytes)
