"""More or fewer devices: rows are the fastest layouts, and no smaller number would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch
from autopar.nouns.cluster import DeviceGroup
from autopar.nouns.layout import Pins
from autopar.nouns.recompute import FULL, Recompute
from autopar.planner.advice.scaling import Asked, Scaled, Scaling, fewest, scaling, searched
from autopar.planner.ask.resized import NoSuchCluster, resized
from autopar.planner.family.sweep import sweep

CLUSTERS = Path(__file__).parents[2] / "examples/clusters"
H100_64 = load_cluster(CLUSTERS / "h100_8x8.yaml")
TORUS = load_cluster(CLUSTERS / "tpu_v5p_64.yaml")
SMALL = Arch("small", 8, 8192, 64, 8, 28672, 32000, 4096)


@pytest.fixture(scope="module")
def asked() -> Asked:
    tight = replace(H100_64.device, memory_bytes=40 << 30)
    return Asked(SMALL, replace(H100_64, groups=(DeviceGroup(tight, 64),)), 32)


@pytest.fixture(scope="module")
def rows(asked: Asked) -> Scaling:
    return scaling(asked, [16, 2, 8], Pins())


@pytest.mark.parametrize("cluster", [H100_64, TORUS], ids=lambda c: c.name)
@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_a_resized_cluster_has_the_devices_and_its_levels_join_them(cluster, factor) -> None:  # type: ignore[no-untyped-def]
    devices = int(cluster.device_count * factor)
    other = resized(cluster, devices)
    assert other.device_count == other.levels[-1].span == devices
    for level in other.levels:
        sides = 1
        for side in level.torus_shape:
            sides *= side
        assert sides in (1, level.span)
    assert resized(other, cluster.device_count) == cluster


@pytest.mark.parametrize(("devices", "spans"), [(8, [4, 8]), (32, [8, 32])])
def test_kinds_keep_their_shares_and_share_no_near_domain(devices: int, spans: list[int]) -> None:
    other = resized(load_cluster(CLUSTERS / "a100_8_h100_8.yaml"), devices)
    assert [group.count for group in other.groups] == [devices // 2, devices // 2]
    for levels in (other.levels, *(group.levels for group in other.groups)):
        assert [level.span for level in levels] == spans


def test_devices_of_one_domain_need_no_level_above() -> None:
    assert [level.name for level in resized(H100_64, 4).levels] == [H100_64.levels[0].name]
    assert resized(H100_64, 1).levels[0].span == 1


def test_a_domain_filled_in_part_is_refused_with_what_would_do() -> None:
    with pytest.raises(NoSuchCluster, match=r"12 devices .* it has 8 devices; give 8 or 16"):
        resized(H100_64, 12)
    with pytest.raises(NoSuchCluster, match=r"no slice of TPU v5p has 63 devices.* 64 \(4x4x4\)"):
        resized(TORUS, 63)
    plain = replace(TORUS, levels=(replace(TORUS.levels[0], torus_wraps=()),))
    with pytest.raises(NoSuchCluster, match="no torus"):
        resized(plain, 63)


def test_a_smaller_slice_is_one_that_exists() -> None:
    pod = load_cluster(CLUSTERS / "tpu_v5e_256.yaml")
    half = resized(pod, 128).levels[0]
    assert (half.torus_shape, half.torus_wraps) == ((8, 16), (False, True))
    assert resized(load_cluster(CLUSTERS / "tpu_v6e_4x64.yaml"), 128).levels[1].span == 128


def test_rows_are_the_fastest_layouts_in_the_order_of_devices(asked: Asked, rows: Scaling) -> None:
    assert [row.devices for row in rows.rows] == [2, 8, 16]
    for row in rows.rows:
        best = sweep(SMALL, resized(asked.cluster, row.devices), 32, keep=1)
        assert row.fits == bool(best)
        if best:
            assert row.estimate is not None
            assert (row.estimate.step_time_s, row.estimate.layout) == (best[0][0], best[0][2])
    assert not rows.rows[0].fits
    assert "layouts fits" in rows.rows[0].why


def test_efficiency_and_cost_follow_from_time_and_devices(rows: Scaling) -> None:
    _, first, last = rows.rows
    assert first.estimate is not None
    assert last.estimate is not None
    assert rows.efficiency(first) == 1
    ratio = 8 * first.estimate.step_time_s / (16 * last.estimate.step_time_s)
    assert rows.efficiency(last) == pytest.approx(ratio)
    tokens = 32 * SMALL.seq
    hours = 16 * last.estimate.step_time_s / 3600 * 1e9 / tokens
    assert last.device_hours_per_billion_tokens == pytest.approx(hours)


def test_no_fewer_devices_would_do(asked: Asked, rows: Scaling) -> None:
    assert rows.fewest is not None
    assert rows.fewest.devices <= 8
    for devices in (1, 2, 4):
        fits = bool(sweep(SMALL, resized(asked.cluster, devices), 32, keep=1))
        assert fits == (devices >= rows.fewest.devices)
    grown = fewest(asked, [Scaled(2, None)])
    assert grown is not None
    assert grown.devices == rows.fewest.devices


def test_a_batch_that_nothing_divides_has_no_fewest(asked: Asked) -> None:
    odd = replace(asked, arch=replace(SMALL, layers=10**3), global_batch=1)
    assert fewest(odd, [Scaled(1, None)]) is None


def test_what_is_pinned_is_every_rows_layout(asked: Asked) -> None:
    scaled = scaling(asked, [8, 16, 64], Pins(tp=8, pp=2, recompute=Recompute(FULL)))
    few, more, most = scaled.rows
    assert "does not divide 8 devices" in few.why
    assert few.estimate is None
    assert more.estimate is not None
    assert more.estimate.layout.dp_shard == 1
    assert most.estimate is not None
    assert (most.estimate.layout.tp, most.estimate.layout.dp_shard) == (8, 4)
    assert scaled.fewest is None


def test_a_search_keeps_the_next_layouts(asked: Asked) -> None:
    fastest = searched(asked.on(8), keep=3)
    assert fastest.best is not None
    times = [
        fastest.best.step_time_s,
        *(seconds for seconds, _, _ in fastest.others),
    ]
    assert times == sorted(times)
    assert len(times) == 3 <= fastest.count
