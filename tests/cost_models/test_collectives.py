"""Collectives obey physics: more bytes or ranks never cost less, a part never costs more."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster_file import load_cluster
from autopar.cost_models.collectives import KINDS, AxisGroup, Kind, collective_time_s
from autopar.nouns.cluster import Cluster

ROOT = Path(__file__).parents[2]
SWITCHED = ["h100_8", "h100_32x8", "ethernet_2x4"]
CLUSTERS = {
    name: load_cluster(ROOT / f"examples/clusters/{name}.yaml")
    for name in [*SWITCHED, "tpu_v5p_64"]
}
clusters = st.sampled_from(sorted(CLUSTERS)).map(CLUSTERS.__getitem__)
switched = st.sampled_from(SWITCHED).map(CLUSTERS.__getitem__)
kinds = st.sampled_from(KINDS)
sizes = st.floats(min_value=1.0, max_value=1e11)


@st.composite
def groups(draw: st.DrawFn, cluster: Cluster) -> AxisGroup:
    size = draw(st.integers(1, cluster.device_count))
    stride = draw(st.integers(1, max(1, (cluster.device_count - 1) // max(1, size - 1))))
    return AxisGroup(size, stride)


@settings(max_examples=300, deadline=None)
@given(st.data(), clusters, kinds, sizes, st.floats(1.0, 4.0))
def test_more_bytes_never_cost_less(
    data: st.DataObject, cluster: Cluster, kind: Kind, size: float, factor: float
) -> None:
    group = data.draw(groups(cluster))
    less = collective_time_s(cluster, kind, size, group)
    more = collective_time_s(cluster, kind, size * factor, group)
    assert less <= more * (1 + 1e-12)
    assert more <= factor * less * (1 + 1e-9)  # and no cliff: the time per byte never grows


@settings(max_examples=300, deadline=None)
@given(st.data(), switched, kinds, sizes)
def test_more_ranks_never_cost_less(
    data: st.DataObject, cluster: Cluster, kind: Kind, size: float
) -> None:
    stride = data.draw(st.sampled_from([s for s in (1, 2, 4, 8) if s < cluster.device_count]))
    most = (cluster.device_count - 1) // stride
    n = data.draw(st.integers(1, most))
    fewer = collective_time_s(cluster, kind, size, AxisGroup(n, stride))
    more = collective_time_s(cluster, kind, size, AxisGroup(n + 1, stride))
    assert fewer <= more * (1 + 1e-12)


@settings(max_examples=300, deadline=None)
@given(st.data(), clusters, sizes)
def test_all_reduce_costs_at_least_its_parts_and_at_most_both(
    data: st.DataObject, cluster: Cluster, size: float
) -> None:
    group = data.draw(groups(cluster))
    time = {kind: collective_time_s(cluster, kind, size, group) for kind in KINDS}
    assert time["all_reduce"] >= time["reduce_scatter"]
    assert time["all_reduce"] <= (time["reduce_scatter"] + time["all_gather"]) * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(st.data(), clusters, kinds, st.lists(sizes, min_size=1, max_size=5))
def test_an_array_of_sizes_is_priced_as_each_alone(
    data: st.DataObject, cluster: Cluster, kind: Kind, many: list[float]
) -> None:
    group = data.draw(groups(cluster))
    together = collective_time_s(cluster, kind, np.array([*many, 0.0]), group)
    alone = [collective_time_s(cluster, kind, size, group) for size in (*many, 0.0)]
    np.testing.assert_allclose(together, alone)


def test_one_rank_and_no_bytes_are_free() -> None:
    cluster = CLUSTERS["h100_32x8"]
    assert collective_time_s(cluster, "all_reduce", 1e9, AxisGroup(1)) == 0.0
    assert collective_time_s(cluster, "all_reduce", 0.0, AxisGroup(8)) == 0.0


def test_groups_share_the_only_network_card() -> None:
    cluster = CLUSTERS["ethernet_2x4"]
    across = collective_time_s(cluster, "all_reduce", 1e9, AxisGroup(2, 4))
    inside = collective_time_s(cluster, "all_reduce", 1e9, AxisGroup(4, 1))
    # Four groups push 1 GB each way through one 1.25 GB/s card: at least 3.2 s.
    assert across >= 4 * 1e9 / 1.25e9
    assert inside < 0.02


def test_rails_are_not_shared() -> None:
    cluster = CLUSTERS["h100_32x8"]
    rail = collective_time_s(cluster, "all_gather", 1e9, AxisGroup(32, 8))
    whole = collective_time_s(cluster, "all_gather", 1e9, AxisGroup(256, 1))
    assert rail == pytest.approx(1e9 * 31 / 32 / 50e9 / 0.93, rel=0.05)
    assert whole < rail / 5  # a group that owns all eight ports of a node uses them


def test_a_group_past_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        collective_time_s(CLUSTERS["h100_8"], "all_reduce", 1.0, AxisGroup(4, 4))
