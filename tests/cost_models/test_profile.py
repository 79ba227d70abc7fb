"""A profile keeps what was measured, refuses what it cannot know, and becomes rates."""

from pathlib import Path

import pytest

from autopar.cluster_file import load_cluster
from autopar.cost_models.calibrate import calibrate
from autopar.cost_models.collectives import AxisGroup, collective_time_s
from autopar.cost_models.compute import op_time_s
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb, ProfileError
from autopar.cost_models.provenance import collective_origins, op_origins
from autopar.nouns.cluster import Cluster

ROOT = Path(__file__).parents[2]
HERE = Machine("H100", "driver 1", "torch 2.13.0")


def measurement(key: str, size: float, flops: float, seconds: float) -> Measurement:
    subject = "op" if flops else "collective"
    return Measurement(subject, key, size, flops, seconds, 0.1, 10, "2026-11-01T00:00:00+00:00")


def filled(path: Path, machine: Machine = HERE) -> None:
    with ProfileDb(path) as db:
        for size in (1e3, 1e6, 1e9):
            db.add(machine, measurement("all_reduce 8", size, 0.0, 1e-5 + size / 2e11))
            flops = size * 1e3
            db.add(machine, measurement(f"matmul bf16 {size:g}", size, flops, 4e-6 + flops / 5e14))


def test_measurements_become_rates(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    cluster = calibrate(load_cluster(ROOT / "examples/clusters/h100_8.yaml"), tmp_path / "p.db")
    seconds = collective_time_s(cluster, "all_reduce", 1e8, AxisGroup(8))
    assert seconds == pytest.approx(1e-5 + 1e8 / 2e11, rel=1e-3)
    assert op_time_s(cluster, 1e12, 1.0, "bf16", "matmul") == pytest.approx(1e12 / 5e14, rel=0.01)
    assert Cluster.from_json(cluster.to_json()) == cluster
    hows = {origin.what: origin.how for origin in op_origins(cluster, "bf16")}
    assert hows["matmul bf16"] == "measured"
    assert hows["elementwise bf16"] == "assumed"
    assert any(origin.how == "measured" for origin in collective_origins(cluster))


def test_another_device_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    with pytest.raises(ProfileError, match="holds measurements of H100, the cluster has A100-40GB"):
        calibrate(load_cluster(ROOT / "examples/clusters/ethernet_2x4.yaml"), tmp_path / "p.db")


def test_another_version_is_used_and_said(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    said: list[str] = []
    cluster = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    calibrate(cluster, tmp_path / "p.db", "torch 3.0", said.append)
    assert "measured with torch 2.13.0, here is torch 3.0" in said[0]


def test_what_is_done_is_not_measured_again(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    with ProfileDb(tmp_path / "p.db") as db:
        assert ("collective", "all_reduce 8", 1e6, 0.0) in db.done(HERE)
        assert not db.done(Machine("H100", "driver 2", "torch 2.13.0"))


def test_impossible_figures_are_refused(tmp_path: Path) -> None:
    with (
        ProfileDb(tmp_path / "p.db") as db,
        pytest.raises(ProfileError, match="out of any physical range"),
    ):
        db.add(HERE, measurement("all_reduce 8", 1e9, 0.0, 0.0))


@pytest.mark.parametrize("damage", ["header", "tail"])
def test_a_damaged_file_is_set_aside_and_read_as_far_as_it_goes(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "p.db"
    with ProfileDb(path) as db:
        for i in range(600):
            db.add(HERE, measurement(f"all_reduce {i}", 1e6, 0.0, 1e-3))
    raw = bytearray(path.read_bytes())
    if damage == "header":
        raw[:100] = b"x" * 100
    else:
        raw = raw[: len(raw) // 2]
    path.write_bytes(bytes(raw))
    said: list[str] = []
    with ProfileDb(path, said.append) as db:
        db.add(HERE, measurement("all_reduce 2", 1e6, 0.0, 1e-3))
    assert "was damaged" in said[0]
    assert path.with_name("p.db.corrupt1").read_bytes() == bytes(raw)
