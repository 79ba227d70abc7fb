"""Collectives obey physics: more bytes or ranks never cost less, a part never costs more."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.collectives import KINDS, AxisGroup, Kind
from autopar.files.cluster_file import load_cluster
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.level import Level
from tests.cost_models.collective import collective_time_s

ROOT = Path(__file__).parents[2]
SWITCHED = ["h100_8", "h100_32x8", "ethernet_2x4"]
CLUSTERS = {
    name: load_cluster(ROOT / f"examples/clusters/{name}.yaml")
    for name in [*SWITCHED, "tpu_v5p_64"]
}


@st.composite
def drawn(draw: st.DrawFn, torus: bool = True) -> Cluster:
    """One to three levels of any speeds, ports, oversubscription; switches that add, or a torus."""
    levels: list[Level] = []
    span = 1
    for name in ("inner", "middle", "outer")[: draw(st.integers(1, 3))]:
        inner = span
        speed, latency = draw(st.floats(1e9, 1e12)), draw(st.floats(1e-7, 1e-4))
        if torus and not levels and draw(st.booleans()):
            shape = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
            span = math.prod(shape)
            levels.append(Level(name, span, speed, latency, topology="torus", torus_shape=shape))
            continue
        span *= draw(st.integers(2, 8))
        thin, ports = draw(st.floats(1, 8)), draw(st.integers(1, inner))
        level = Level(name, span, speed, latency, ports=ports, oversubscription=thin)
        levels.append(replace(level, in_network_reduction=draw(st.booleans())))
    return Cluster("drawn", (DeviceGroup(find_device("H100"), span),), tuple(levels))


clusters = st.sampled_from(sorted(CLUSTERS)).map(CLUSTERS.__getitem__) | drawn()
switched = st.sampled_from(SWITCHED).map(CLUSTERS.__getitem__) | drawn(torus=False)
kinds = st.sampled_from(KINDS)
sizes = st.floats(0.0, 11.0).map(lambda exponent: 10.0**exponent)


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


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), cluster=switched, size=sizes)
def test_more_ranks_never_cost_less(
    kind: Kind, data: st.DataObject, cluster: Cluster, size: float
) -> None:
    stride = data.draw(st.integers(1, cluster.device_count - 1))
    most = (cluster.device_count - 1) // stride
    ends = [level.span // stride for level in cluster.levels if stride <= level.span]
    n = data.draw(st.integers(1, most) | st.sampled_from([min(most, end) for end in ends]))
    fewer = collective_time_s(cluster, kind, size, AxisGroup(n, stride))
    more = collective_time_s(cluster, kind, size, AxisGroup(n + 1, stride))
    assert fewer <= more * (1 + 1e-12)


def test_strides_that_do_not_divide_a_domain_cross_it_all_the_same() -> None:
    levels = tuple(
        Level(name, span, 1e9, latency_s)
        for name, span, latency_s in (("inner", 3, 2e-5), ("middle", 6, 7e-5), ("outer", 12, 1e-7))
    )
    cluster = Cluster("odd", (DeviceGroup(find_device("H100"), 12),), levels)
    # Ranks 0, 2, 4 and then 6: the step from 2 to 4 stays one between inner domains.
    three, four = (collective_time_s(cluster, "broadcast", 1.0, AxisGroup(n, 2)) for n in (3, 4))
    assert four > three
    assert four == pytest.approx(three + 1e-7, rel=1e-4)


@settings(max_examples=300, deadline=None)
@given(st.data(), clusters, sizes)
def test_all_reduce_costs_at_least_its_parts_and_at_most_both(
    data: st.DataObject, cluster: Cluster, size: float
) -> None:
    group = data.draw(groups(cluster))
    time = {kind: collective_time_s(cluster, kind, size, group) for kind in KINDS}
    assert time["all_reduce"] >= time["reduce_scatter"]
    assert time["all_reduce"] <= (time["reduce_scatter"] + time["all_gather"]) * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(st.data(), clusters, kinds, sizes, st.floats(1.0, 16.0))
def test_a_thinner_level_never_costs_less(
    data: st.DataObject, cluster: Cluster, kind: Kind, size: float, factor: float
) -> None:
    group = data.draw(groups(cluster))
    levels = list(cluster.levels)
    at = data.draw(st.integers(0, len(levels) - 1))
    levels[at] = replace(levels[at], oversubscription=levels[at].oversubscription * factor)
    thinner = replace(cluster, levels=tuple(levels))
    before = collective_time_s(cluster, kind, size, group)
    assert before <= collective_time_s(thinner, kind, size, group) * (1 + 1e-12)


def test_a_group_that_straddles_levels_pays_for_the_slow_one() -> None:
    cluster = CLUSTERS["h100_32x8"]
    inside = collective_time_s(cluster, "all_gather", 1e9, AxisGroup(8))
    straddling = collective_time_s(cluster, "all_gather", 1e9, AxisGroup(12))
    outer_wire_s = 4 / 12 * 1e9 / (8 * 50e9)  # what the second node lacks, over all its ports
    assert straddling > inside
    assert straddling > outer_wire_s


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
