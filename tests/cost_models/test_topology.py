"""What a topology does to a price: torus links, shared buses, thin trees, measured libraries."""

from dataclasses import replace

import pytest

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.collectives import AxisGroup
from autopar.cost_models.constants import constant
from autopar.cost_models.torus import Covered, covered
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.level import Level, MeasuredCollective
from tests.cost_models.collective import collective_time_s

H100 = find_device("H100")
CUBE = Level("ici", 64, 1e11, 1e-6, topology="torus", torus_shape=(4, 4, 4), library="xla")
LARGE = 1e10


def cluster(*levels: Level) -> Cluster:
    return Cluster("test", (DeviceGroup(H100, levels[-1].span),), levels)


def plain(dims: list[Covered]) -> list[tuple[int, bool, float]]:
    return [(dim.extent, dim.ring, dim.shared) for dim in dims]


def test_groups_of_a_torus_cover_its_dims() -> None:
    assert plain(covered(CUBE, 4, 1)) == [(4, True, 1.0)]
    assert plain(covered(CUBE, 16, 1)) == [(4, True, 1.0), (4, True, 1.0)]
    assert plain(covered(CUBE, 4, 16)) == [(4, True, 1.0)]
    assert plain(covered(CUBE, 2, 1)) == [(2, False, 1.0)]
    assert plain(covered(CUBE, 2, 2)) == [(2, False, 2.0)]  # two interleaved pairs share the links


def test_more_dims_of_a_torus_carry_more() -> None:
    cube = cluster(CUBE)
    line, plane, whole = (
        collective_time_s(cube, "all_gather", LARGE, AxisGroup(n)) for n in (4, 16, 64)
    )
    assert line > plane > whole  # one, two and three dims of links, twice the links each way
    assert line == pytest.approx(LARGE * 3 / 4 / 2e11 / constant("torus_wire_fraction"), rel=0.01)


def test_all_to_all_on_a_torus_is_bound_by_its_bisection() -> None:
    seconds = collective_time_s(cluster(CUBE), "all_to_all", LARGE, AxisGroup(64))
    assert seconds >= LARGE * 4 / 8 / 1e11


def test_oversubscription_slows_what_crosses_it() -> None:
    node = Level("nvlink", 8, 4.5e11, 2e-6)
    tree = Level("ib", 64, 5e10, 5e-6, ports=8)
    thin = replace(tree, oversubscription=4.0)
    whole, inside = AxisGroup(64), AxisGroup(8)
    fast = collective_time_s(cluster(node, tree), "all_reduce", LARGE, whole)
    slow = collective_time_s(cluster(node, thin), "all_reduce", LARGE, whole)
    assert slow > 3 * fast
    assert collective_time_s(cluster(node, tree), "all_reduce", LARGE, inside) == (
        collective_time_s(cluster(node, thin), "all_reduce", LARGE, inside)
    )


def test_a_bus_is_shared_by_all_its_devices() -> None:
    switch = cluster(Level("pcie", 8, 3e10, 5e-6))
    bus = cluster(Level("pcie", 8, 3e10, 5e-6, topology="bus"))
    on_switch = collective_time_s(switch, "all_gather", LARGE, AxisGroup(8))
    on_bus = collective_time_s(bus, "all_gather", LARGE, AxisGroup(8))
    assert on_bus == pytest.approx(8 * on_switch, rel=0.01)


def test_switches_that_add_make_all_reduce_cheaper() -> None:
    plain = Level("nvlink", 8, 4.5e11, 2e-6)
    adding = replace(plain, in_network_reduction=True)
    slow = collective_time_s(cluster(plain), "all_reduce", LARGE, AxisGroup(8))
    assert collective_time_s(cluster(adding), "all_reduce", LARGE, AxisGroup(8)) < slow


def test_gloo_reduces_everything_everywhere() -> None:
    host = cluster(Level("loopback", 4, 1e9, 1e-4, library="gloo"))
    one = collective_time_s(host, "reduce_scatter", 1e7, AxisGroup(4))
    assert one == collective_time_s(host, "all_reduce", 1e7, AxisGroup(4))


def test_measured_curves_go_first() -> None:
    points = ((1e4, 1e-3), (1e6, 2e-3), (2e6, 5e-3))
    curve = MeasuredCollective("all_reduce", 4, points)
    host = cluster(Level("loopback", 4, 1e9, 1e-4, library="gloo", measured=(curve,)))
    sizes = [0.0, 1.0, 1e4, 1e6, 1.5e6, 2e6, 4e6]
    expected = [0.0, 1e-3, 1e-3, 2e-3, 3.5e-3, 5e-3, 11e-3]
    for size, seconds in zip(sizes, expected, strict=True):
        assert collective_time_s(host, "all_reduce", size, AxisGroup(4)) == pytest.approx(seconds)
    assert collective_time_s(host, "all_reduce", 1e6, AxisGroup(2)) != pytest.approx(2e-3)
