"""Cluster files: units, refusals that help, and the text form that reads back."""

from pathlib import Path

import pytest

from autopar.cost_models.catalogue import catalogue, find_device
from autopar.cost_models.units import UnitError, parse_quantity
from autopar.files.cluster_file import ClusterFileError, cluster_from_text, load_cluster
from autopar.nouns.cluster import Cluster

ROOT = Path(__file__).parents[2]
GOOD = """
groups: [{device: H100, count: 16}]
levels:
  - {name: nvlink, span: 8, bandwidth: 450 GB/s, latency: 2 us}
  - {name: ib, span: 16, bandwidth: 400 Gbit/s, latency: 5 us}
"""


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("900 GB/s", "bandwidth_bytes_per_s", 900e9),
        ("400 Gbit/s", "bandwidth_bytes_per_s", 50e9),
        ("400 Gbps", "bandwidth_bytes_per_s", 50e9),
        ("80 GiB", "size_bytes", 80 * 2**30),
        ("80 GB", "size_bytes", 80e9),
        ("5 us", "time_s", 5e-6),
        ("0.2 ms", "time_s", 2e-4),
        ("989.4 TFLOP/s", "flops_per_s", 989.4e12),
    ],
)
def test_units(text: str, quantity: str, value: float) -> None:
    assert parse_quantity(text, quantity) == pytest.approx(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("900", "bandwidth_bytes_per_s"),
        ("900 GB", "bandwidth_bytes_per_s"),
        ("80 Gbit", "size_bytes"),
        ("-5 us", "time_s"),
        ("0 GiB", "size_bytes"),
        ("fast", "time_s"),
        ("5 minutes", "time_s"),
    ],
)
def test_wrong_units_are_refused(text: str, quantity: str) -> None:
    with pytest.raises(UnitError):
        parse_quantity(text, quantity)  # type: ignore[arg-type]


def test_ports_default_to_one_a_device() -> None:
    cluster = cluster_from_text(GOOD)
    assert [level.ports for level in cluster.levels] == [1, 8]
    assert cluster.device_count == 16


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("span: 8", "span: 5", "does not divide the 16 devices"),
        ("span: 16", "span: 12", "not a multiple of the span 8"),
        ("span: 16", "span: 8", "not a multiple"),
        ("450 GB/s", "450", "has no unit"),
        ("450 GB/s", "450 GiB", "no unit|has unit"),
        ("450 GB/s", "-1 GB/s", "greater than zero"),
        ("450 GB/s", "9e30 GB/s", "out of any physical range"),
        ("count: 16", "count: 0", "greater than 0"),
        ("H100", "H1000", r"no device 'H1000'\. Did you mean H100\? The catalogue has"),
        ("H100", "a100_80g", r"Did you mean A100-80GB\?"),
        ("H100", "abacus", r"no device 'abacus'\. The catalogue has"),
        ("450 GB/s", "9e30 GB/s", r"levels\[0\].* B/s, allowed 1e\+05 to 1e\+14 B/s"),
        ("450 GB/s", "450", r"levels\[0\].bandwidth: 450 has no unit; write it like '450 GB/s'"),
        ("count: 16", "count: many", r"groups\[0\].count: 'many' is not a whole number"),
        ("count: 16", "count: 1.5", r"groups\[0\].count: 1.5 is not a whole number"),
        (
            "latency: 2 us",
            "latency: 2 us, colour: red",
            "colour: unknown key; there are name, span",
        ),
        ("latency: 2 us", "latancy: 2 us", "latancy: unknown key, did you mean 'latency'"),
        ("latency: 2 us", "latancy: 2 us", "latency: missing; write it like '5 us'"),
        ("latency: 2 us", "latency: 2 us, topology: tours", "none of .*did you mean 'torus'"),
        ("name: nvlink, ", "", r"levels\[0\].name: missing"),
        ("groups:", "groupz:", "groupz: unknown key, did you mean 'groups'"),
        ("levels:", "levels: []\nother:", "levels: empty; give at least 1"),
        ("levels:", "levels: 3\nother:", "levels: 3 is not a list"),
        ("groups:", "groups: [", "not YAML at line"),
        ("groups:", "groups: []\ngroups:", r"not YAML at line 3.*'groups' is given twice"),
        ("groups:", "? [a, b]\n: 1\ngroups:", "not YAML at line 2.*unhashable key"),
        ("count: 16", "count: 100000000000", r"must be at most 1e\+07"),
    ],
)
def test_bad_files_get_one_helpful_message(old: str, new: str, says: str) -> None:
    with pytest.raises(ClusterFileError, match=says):
        cluster_from_text(GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slice: v5e-3x3", r"^slice: there is no slice v5e-3x3 .*v5e-4x4 \(16\)"),
        ("slice: 16", "slice: 16 is no text"),
        ("slice: v5e-4x4\nslices: 0", "slices: 0 must be greater than 0"),
        ("slice: v5e-4x4\nslicess: 2", "slicess: unknown key, did you mean 'slices'"),
        ("slice: v5e-4x4\nlevels: []", "and so does levels:; keep one of them"),
        (
            "groups: [{device: TPU-v5e, count: 16}]\nlevels: [{name: ici, span: 16, bandwidth: "
            "50 GB/s, latency: 1 us, topology: torus, torus_shape: [4, 4], torus_wraps: [true]}]",
            r"torus_wraps has 1 entries for the 2 dimensions",
        ),
    ],
)
def test_bad_slices_get_one_helpful_message(text: str, says: str) -> None:
    with pytest.raises(ClusterFileError, match=says):
        cluster_from_text(text)


def test_a_slice_is_what_its_parts_written_out_are() -> None:
    written = """
groups: [{device: TPU-v5e, count: 256}]
levels:
  - {name: ici, span: 128, bandwidth: 50 GB/s, latency: 1 us, topology: torus,
     torus_shape: [8, 16], torus_wraps: [false, true], library: xla}
  - {name: dcn, span: 256, bandwidth: 25 Gbit/s, latency: 25 us, library: xla}
"""
    named = cluster_from_text("slice: v5e-8x16\nslices: 2")
    assert named.to_json() == cluster_from_text(written).to_json()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="no cluster file"):
        load_cluster(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "examples/clusters").glob("*.yaml")), ids=str)
def test_examples_load_and_read_back(path: Path) -> None:
    cluster = load_cluster(path)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert len(cluster.fingerprint) == 12


def test_local_describes_this_machine() -> None:
    cluster = load_cluster("local")
    assert cluster.device_count >= 1
    assert cluster.memory_bytes > 1 << 24


def test_own_devices_and_mixed_groups() -> None:
    cluster = cluster_from_text(
        """
devices:
  fast: {kind: gpu, memory: 96 GB, memory_bandwidth: 4 TB/s, peak: {bf16: 1 PFLOP/s}}
groups: [{device: fast, count: 4}, {device: A100-40GB, count: 4}]
levels: [{name: net, span: 8, bandwidth: 100 Gbit/s, latency: 5 us}]
"""
    )
    assert len({group.device for group in cluster.groups}) > 1
    assert cluster.device.name == "A100-40GB"
    assert cluster.device_at(3).peak("bfloat16") == 1e15
    assert cluster.memory_bytes == 40 * 2**30


OWN_LEVELS = """
groups:
  - {device: A100, count: 8, levels: [{name: old, span: 4, bandwidth: 300 GB/s, latency: 2 us}]}
  - {device: H100, count: 16, levels: [{name: new, span: 8, bandwidth: 450 GB/s, latency: 2 us}]}
levels:
  - {name: ib, span: 24, bandwidth: 200 Gbit/s, latency: 5 us}
"""


def test_groups_may_have_levels_of_their_own() -> None:
    cluster = cluster_from_text(OWN_LEVELS)
    old, new = (group.levels for group in cluster.groups)
    assert [level.span for level in old] == [4, 24]
    assert [level.span for level in new] == [8, 24]
    # Together they are as far apart as the smaller nodes are, with as many ports a device.
    assert [(level.span, level.ports) for level in cluster.levels] == [(4, 1), (8, 4), (24, 8)]
    assert [level.bandwidth_bytes_per_s for level in cluster.levels] == [300e9, 25e9, 25e9]
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert cluster.alike(8, 16).levels == new
    assert cluster.alike(0, 24) is cluster
    assert cluster.alike(4, 8).device.name == "A100-80GB"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("span: 24", "span: 8", "no link joins the groups 8 x A100.* and 16 x H100: the widest"),
        ("levels:\n  - {name: ib", "devices: {}\n#", "no link joins the groups.*spans 1 of 24"),
        ("span: 4", "span: 3", r"groups\[0\].levels: span 3 does not divide the 8 devices"),
        ("count: 8, ", "count: 6, ", "span 4 does not divide the 6 devices of the group"),
        ("span: 4, ", "span: 4, topology: torus, torus_shape: [4], ", "describe its links as a sw"),
    ],
)
def test_groups_that_do_not_go_together_are_refused(old: str, new: str, says: str) -> None:
    with pytest.raises(ClusterFileError, match=says):
        cluster_from_text(OWN_LEVELS.replace(old, new, 1))


def test_groups_of_any_sizes_are_joined_as_wholes() -> None:
    text = OWN_LEVELS.replace("span: 4,", "span: 8,").replace(
        "span: 8, bandwidth: 450", "span: 16, bandwidth: 450"
    )
    cluster = cluster_from_text(text)
    assert [[level.span for level in group.levels] for group in cluster.groups] == [
        [8, 24],
        [16, 24],
    ]
    # Two of the larger group's devices may lie in two domains of eight: taken as over ib.
    assert [level.span for level in cluster.levels] == [8, 24]
    assert [level.bandwidth_bytes_per_s for level in cluster.levels] == [300e9, 25e9]
    parts = text.replace("count: 16", "count: 32").replace("span: 24", "span: 40")
    with pytest.raises(
        ClusterFileError, match="span 40 is not a multiple of the span 16 of groups"
    ):
        cluster_from_text(parts)


def test_a_binary_cluster_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\x80\xe9\x00")
    with pytest.raises(ClusterFileError, match="cannot be read as text"):
        load_cluster(tmp_path / "c.yaml")


def test_every_catalogue_figure_has_a_source() -> None:
    for device in catalogue().values():
        assert device.source, device.name
    assert find_device("h100-sxm") is catalogue()["H100"]
