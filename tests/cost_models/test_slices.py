"""Slices of TPUs: which exist, where their dims are rings, and what moves over them."""

import pytest

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.collectives import AxisGroup, on_torus
from autopar.cost_models.slices import UnknownSlice, find_slice, generations
from autopar.cost_models.torus import sums_whole
from autopar.nouns.cluster import Cluster, DeviceGroup
from tests.cost_models.collective import collective_time_s

LARGE = 1e10


def cluster(name: str, slices: int = 1) -> Cluster:
    made = find_slice(name)
    device = find_device(made.generation.device)
    group = DeviceGroup(device, made.device_count * slices)
    return Cluster(name, (group,), made.levels(slices))


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5e-4x4", (False, False)),
        ("v5e:8x16", (False, True)),
        ("v6e-16x16", (True, True)),
        ("TPU v5p-4x4x4", (True, True, True)),
        ("v5p-2x4x4", (False, False, False)),
        ("v5litepod-1x1", (False, False)),
    ],
)
def test_dims_are_rings_where_their_ends_are_joined(name: str, wraps: tuple[bool, ...]) -> None:
    assert find_slice(name).levels()[0].torus_wraps == wraps


def test_every_shape_of_the_table_is_a_cluster() -> None:
    for kind in generations().values():
        for shape in kind.shapes:
            made = cluster(f"{kind.name}-{'x'.join(map(str, shape))}")
            assert made.levels[-1].span == made.device_count
            assert Cluster.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5e-3x3", r"no slice v5e-3x3 \(9 chips\).*v5e-2x4 \(8\), v5e-4x4 \(16\)"),
        ("v5p-4x4x6", r"v5p-4x4x8 \(128\).*multiples of 4 along each of three dims"),
        ("v5p-8x4x4", r"v5p-4x4x8 \(128\).*the shortest first"),
        ("v5p-64x64x64", r"\(262144 chips\).*up to 6144 chips"),
        ("v6e-32x32", r"v6e-16x16 \(256\)"),
        ("v5p-128", r"64 chips.*v5p-4x4x4 \(64\)"),
        ("v9-4x4", "no TPU 'v9'.*v4, v5e"),
        ("sixteen", "names no slice; write .* v5e-4x4"),
    ],
)
def test_what_does_not_exist_has_its_nearest(name: str, says: str) -> None:
    with pytest.raises(UnknownSlice, match=says):
        find_slice(name)


def test_a_line_carries_half_of_a_ring() -> None:
    ring = collective_time_s(cluster("v5e-16x16"), "all_gather", LARGE, AxisGroup(16))
    line = collective_time_s(cluster("v5e-8x8"), "all_gather", LARGE, AxisGroup(8))
    assert line * 8 / 7 == pytest.approx(2 * ring * 16 / 15, rel=0.01)


# What libtpu 0.0.52 makes of one psum_scatter: `python -m benchmarks.tpu_scatters` prints it.
@pytest.mark.parametrize(
    ("name", "count", "spacing", "whole"),
    [
        ("v5e-4x4", 16, 1, True),
        ("v5e-4x4", 4, 1, False),
        ("v5e-4x4", 4, 4, False),
        ("v5e-4x4", 8, 1, False),
        ("v5e-4x4", 8, 2, False),
        ("v5e-4x8", 32, 1, False),
        ("v5e-2x2", 4, 1, False),
        ("v5e-16x16", 256, 1, True),
        ("v5e-16x16", 64, 4, False),
        ("v5e-16x16", 128, 1, False),
        ("v5e-8x16", 128, 1, False),
        ("v5p-4x4x4", 64, 1, True),
        ("v5p-4x4x4", 16, 1, False),
        ("v5p-4x4x8", 128, 1, True),
        ("v5p-4x4x8", 64, 1, False),
        ("v5p-2x2x1", 4, 1, False),
        ("v5p-2x2x4", 16, 1, True),
    ],
)
def test_which_scatters_are_sums_of_the_whole(
    name: str, count: int, spacing: int, whole: bool
) -> None:
    level = find_slice(name).levels()[0]
    assert sums_whole(level, count, spacing, across=False) == whole
    place = on_torus(cluster(name), AxisGroup(count, spacing))
    assert place is not None
    assert place.whole == whole


def test_a_scatter_that_would_be_a_sum_is_two() -> None:
    square, group = cluster("v5e-4x4"), AxisGroup(16)
    place = on_torus(square, group)
    assert place is not None
    assert place.first == 8
    scatter = collective_time_s(square, "reduce_scatter", LARGE, group)
    far = collective_time_s(square, "reduce_scatter", LARGE, AxisGroup(8, 2))
    near = collective_time_s(square, "reduce_scatter", LARGE / 8, AxisGroup(2))
    assert scatter == pytest.approx(far + near, 0.01)
    assert scatter < 0.75 * collective_time_s(square, "all_reduce", LARGE, group)
    apart = collective_time_s(square, "reduce_scatter", LARGE, AxisGroup(16, 1, outer=4))
    far = collective_time_s(square, "reduce_scatter", LARGE, AxisGroup(4, 4))
    near = collective_time_s(square, "reduce_scatter", LARGE / 4, AxisGroup(4))
    assert apart == pytest.approx(far + near, 0.01)


def test_a_scatter_over_several_slices_costs_as_much_as_a_sum() -> None:
    several, group = cluster("v5e-4x4", 2), AxisGroup(32)
    place = on_torus(several, group)
    assert place is not None
    assert not place.first
    scatter = collective_time_s(several, "reduce_scatter", LARGE, group)
    assert scatter > collective_time_s(several, "all_gather", LARGE, group)


def test_over_an_oblong_one_is_as_a_gather() -> None:
    oblong, whole = cluster("v5e-4x8"), AxisGroup(32)
    assert collective_time_s(oblong, "reduce_scatter", LARGE, whole) == (
        collective_time_s(oblong, "all_gather", LARGE, whole)
    )


def test_slices_are_joined_by_the_network() -> None:
    several = cluster("v6e-8x8", 4)
    assert [level.name for level in several.levels] == ["ici", "dcn"]
    inside = collective_time_s(several, "all_reduce", LARGE, AxisGroup(64))
    assert collective_time_s(several, "all_reduce", LARGE, AxisGroup(4, 64)) > inside
    place = on_torus(several, AxisGroup(256))
    assert place is not None
    assert place.whole
    assert on_torus(several, AxisGroup(4, 64)) is None


def test_a_chip_of_two_devices_has_a_level_of_its_own() -> None:
    made = cluster("tpu7x-4x4x4")
    assert made.device_count == 128
    assert [level.name for level in made.levels] == ["chip", "ici"]
    pair = collective_time_s(made, "all_gather", LARGE, AxisGroup(2))
    assert pair < collective_time_s(made, "all_gather", LARGE, AxisGroup(2, 2))


def test_of_equal_chips_the_squarest_shape_is_taken() -> None:
    kind = generations()["v5p"]
    shapes = [kind.of_chips(chips) for chips in (32, 64, 512, 1024, 6144, 63)]
    assert shapes == [(2, 4, 4), (4, 4, 4), (8, 8, 8), (8, 8, 16), (16, 16, 24), None]
    assert generations()["tpu7x"].nearest(10**9)[0] == (16, 24, 24)
