"""The price of an all-reduce on two levels: by hand, and beside the library's flat ring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost_models.collectives import AxisGroup, price
from autopar.files.cluster_file import cluster_from_text, load_cluster
from autopar.nouns.level import MeasuredCollective
from autopar.pricing.two_level import sub_groups, two_level_time_s

HOSTS = cluster_from_text("""
name: 2 hosts of 2 processes over 400 Mbit/s
groups:
  - {device: cpu-core, count: 4}
levels:
  - {name: loopback, span: 2, bandwidth: 1 GB/s, latency: 100 us, library: gloo}
  - {name: link, span: 4, bandwidth: 400 Mbit/s, latency: 200 us, ports: 1, library: gloo}
""")
LINK, INSIDE = 50e6, 1e9
SIZE = 8 << 20


def test_groups_are_cut_at_the_hosts() -> None:
    groups = sub_groups(HOSTS, AxisGroup(4))
    assert groups is not None
    assert (groups.inside, groups.across) == (AxisGroup(2, 1), AxisGroup(2, 2))
    assert sub_groups(HOSTS, AxisGroup(2)) is None  # inside one host
    assert sub_groups(HOSTS, AxisGroup(2, 2)) is None  # one rank in each
    nodes = load_cluster(Path(__file__).parents[2] / "examples/clusters/h100_32x8.yaml")
    every = sub_groups(nodes, AxisGroup(128, 2))
    assert every is not None
    assert (every.inside, every.across) == (AxisGroup(4, 2), AxisGroup(32, 8))
    assert sub_groups(nodes, AxisGroup(12)) is None  # a host and a half


def test_a_large_one_takes_the_link_as_long_as_its_bytes() -> None:
    groups = sub_groups(HOSTS, AxisGroup(4))
    assert groups is not None
    first, more = (two_level_time_s(HOSTS, groups, size) for size in (SIZE, 2 * SIZE))
    across = SIZE / LINK  # both ranks' halves over one card, 2 (h - 1) / h = 1 times
    inside = SIZE / 2 / INSIDE + SIZE / 2 / INSIDE
    assert across + inside < more - first < 1.1 * (across + inside)
    assert two_level_time_s(HOSTS, groups, 0) == 0.0


def test_the_ring_of_gloo_knows_no_hosts() -> None:
    """Every byte of it passes the link (n - 1) / n times forth and back, whichever ranks sit
    together: 252 ms and a little latency, of which 269 were measured, and 185 on two levels."""
    ring = price(HOSTS, "all_reduce", AxisGroup(4)).time_s(SIZE)
    assert ring == pytest.approx(1.5 * SIZE / LINK, rel=0.01)
    groups = sub_groups(HOSTS, AxisGroup(4))
    assert groups is not None
    assert two_level_time_s(HOSTS, groups, SIZE) < 0.75 * ring


def test_measured_parts_are_taken() -> None:
    """As measured on such hosts: the library's ring at 1.5 times the bytes, two levels below it."""

    def curve(kind: str, ranks: int, stride: int, seconds: float) -> MeasuredCollective:
        return MeasuredCollective(kind, ranks, ((1.0, 0.0), (SIZE, seconds)), stride)

    inner = (curve("all_to_all", 2, 1, 0.005), curve("all_gather", 2, 1, 0.004))
    outer = (curve("all_reduce", 4, 1, 0.257), curve("all_reduce", 2, 2, 0.340))
    levels = zip(HOSTS.levels, (inner, outer), strict=True)
    measured = replace(HOSTS, levels=tuple(replace(lv, measured=rows) for lv, rows in levels))
    groups = sub_groups(measured, AxisGroup(4))
    assert groups is not None
    took = two_level_time_s(measured, groups, SIZE)
    assert took == pytest.approx(0.340 / 2 + 0.009, rel=0.03)
    assert took < 0.88 * price(measured, "all_reduce", AxisGroup(4)).time_s(SIZE)
