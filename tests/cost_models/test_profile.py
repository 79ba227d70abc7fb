"""A profile keeps what was measured, refuses what it cannot know, and becomes rates."""

import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost_models import profile_file
from autopar.cost_models.calibrate import (
    calibrate,
    collective_curves,
    jitter,
    op_rates,
    overlap_contention,
)
from autopar.cost_models.collectives import AxisGroup
from autopar.cost_models.compute import OpRate, op_rate, op_time_s
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb
from autopar.cost_models.profile_file import ProfileError
from autopar.cost_models.provenance import collective_origins, op_origins
from autopar.files.cluster_file import load_cluster
from autopar.nouns.cluster import Cluster
from tests.cost_models.collective import collective_time_s

ROOT = Path(__file__).parents[2]
HERE = Machine("H100", "driver 1", "torch 2.13.0")


def measurement(
    key: str, size: float, flops: float, seconds: float, subject: str = ""
) -> Measurement:
    subject = subject or ("op" if flops else "collective")
    return Measurement(subject, key, size, flops, seconds, 0.1, 10, "2026-11-01T00:00:00+00:00")


def filled(path: Path, machine: Machine = HERE) -> None:
    rate = 5e10 if machine.device == "cpu-core" else 5e14
    with ProfileDb(path) as db:
        for size in (1e3, 1e6, 1e9):
            db.add(machine, measurement("all_reduce 8x1", size, 0.0, 1e-5 + size / 2e11))
            flops = size * 1e3
            key = f"matmul linear forward bf16 {size:g}"
            db.add(machine, measurement(key, size, flops, 4e-6 + flops / rate))


def test_measurements_become_rates(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    cluster = calibrate(load_cluster(ROOT / "examples/clusters/h100_8.yaml"), tmp_path / "p.db")
    seconds = collective_time_s(cluster, "all_reduce", 1e8, AxisGroup(8))
    assert seconds == pytest.approx(1e-5 + 1e8 / 2e11, rel=1e-3)
    assert op_time_s(cluster, 1e12, 1.0, "bf16", "matmul") == pytest.approx(1e12 / 5e14, rel=0.01)
    assert Cluster.from_json(cluster.to_json()) == cluster
    hows = {origin.what: origin.how for origin in op_origins(cluster, "bf16")}
    assert hows["matmul bf16"] == "measured"
    assert hows["gather bf16"] == "assumed"
    assert any(origin.how == "measured" for origin in collective_origins(cluster))


def test_a_kind_goes_before_its_class_and_a_direction_has_its_own_rate() -> None:
    def rows(kind: str, direction: str, s_per_byte: float) -> list[Measurement]:
        key = f"elementwise {kind} {direction} fp32"
        sizes = (1e3, 1e6, 3e6)
        return [measurement(f"{key} {s:g}", s, 1.0, 1e-6 + s * s_per_byte) for s in sizes]

    measurements = [*rows("add", "forward", 1e-10), *rows("gelu", "forward", 3e-10)]
    measurements += rows("gelu", "backward", 8e-10)
    device = replace(load_cluster(ROOT / "examples/clusters/h100_8.yaml").device, rates=())
    device = replace(device, rates=op_rates(measurements))

    def slope(kind: str, direction: str) -> float:
        return op_rate(device, "fp32", "elementwise", kind, direction).s_per_byte

    assert slope("gelu", "forward") == pytest.approx(3e-10, rel=0.05)
    assert slope("gelu", "backward") == pytest.approx(8e-10, rel=0.05)
    assert slope("add", "forward") == pytest.approx(1e-10, rel=0.05)
    assert slope("tanh", "forward") == pytest.approx(2e-10, rel=0.05)
    assert op_rate(device, "bf16", "elementwise", "gelu", "forward").how != "measured"


def test_collectives_belong_to_the_outermost_level_that_they_cross(tmp_path: Path) -> None:
    seconds = {"all_reduce 2x1": 1e-3, "all_reduce 2x2": 5e-3, "all_reduce 4x1": 9e-3}
    with ProfileDb(tmp_path / "p.db") as db:
        for key, slow in seconds.items():
            for size in (1e4, 1e6):
                here = replace(HERE, device="cpu-core")
                db.add(here, measurement(key, size, 0.0, slow + size * 1e-10))
    cluster = calibrate(load_cluster(ROOT / "examples/clusters/cpu_2x2.yaml"), tmp_path / "p.db")

    def time_s(size: int, stride: int) -> float:
        return collective_time_s(cluster, "all_reduce", 1.0, AxisGroup(size, stride))

    assert time_s(2, 1) == pytest.approx(1e-3, rel=0.01)
    assert time_s(2, 2) == pytest.approx(5e-3, rel=0.01)
    assert time_s(4, 1) == pytest.approx(9e-3, rel=0.01)


def test_noise_does_not_make_more_bytes_faster() -> None:
    seconds = {1e3: 1e-3, 1e4: 3e-3, 1e5: 2e-3, 1e6: 9e-3}
    rows = [measurement("all_gather 4x1", size, 0.0, s) for size, s in seconds.items()]
    (curve,) = collective_curves(rows[::-1])
    sizes, times_s = zip(*curve.points, strict=True)
    assert (curve.kind, curve.ranks, curve.stride, sizes) == ("all_gather", 4, 1, tuple(seconds))
    middle = math.sqrt(3e-3 * 2e-3)
    assert times_s == pytest.approx((1e-3, middle, middle, 9e-3))


@pytest.mark.parametrize(("both", "contention"), [(10e-3, 0.0), (12e-3, 0.5), (14e-3, 1.0)])
def test_contention_is_what_a_hidden_second_costs(both: float, contention: float) -> None:
    times = {"compute": 10e-3, "collective": 4e-3, "both": both}
    measurements = [measurement(key, 0.0, 0.0, t, "overlap") for key, t in times.items()]
    assert overlap_contention(measurements) == pytest.approx(contention)


def test_jitter_grows_as_the_root_of_the_compute() -> None:
    measurements = [
        measurement(f"{t:g} ms", 0.0, 0.0, 0.02 * math.sqrt(1e-3 * t), "waiting") for t in (5, 80)
    ]
    assert jitter(measurements) == pytest.approx(0.02)
    assert jitter([]) == 0.0
    for key in ("20 us", "0 ms", "ms 20", "20"):
        with pytest.raises(ProfileError, match="is not how this tool writes"):
            jitter([measurement(key, 0.0, 0.0, 1e-3, "waiting")])


def test_runs_correct_the_prices_they_were_predicted_by(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    cluster = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    plain = calibrate(cluster, tmp_path / "p.db")
    with ProfileDb(tmp_path / "p.db") as db:
        for plan, basis, ratio in (("a", "measured", 1.2), ("b", "built-in", 9.0)):
            for what, seconds in (("predicted", 0.1), ("measured", 0.1 * ratio)):
                db.add(HERE, measurement(f"forward {what} {basis} {plan}", 0, 0, seconds, "run"))
    learnt = calibrate(cluster, tmp_path / "p.db")

    def rate(where: Cluster, direction: str) -> OpRate:
        return op_rate(where.device, "bf16", "matmul", "linear", direction)

    assert rate(learnt, "forward").time_s(1e12, 0) == pytest.approx(
        1.2 * rate(plain, "forward").time_s(1e12, 0)
    )
    assert rate(learnt, "forward").how == "fitted"
    assert {origin.how for origin in op_origins(learnt, "bf16")} == {"fitted"}
    assert learnt.device.slower("optimizer") == 1.0
    assert Cluster.from_json(learnt.to_json()) == learnt


def test_another_device_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    with pytest.raises(ProfileError, match="holds measurements of H100, the cluster has A100-40GB"):
        calibrate(load_cluster(ROOT / "examples/clusters/ethernet_2x4.yaml"), tmp_path / "p.db")


def test_another_version_is_used_and_said(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    lines: list[str] = []
    cluster = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    calibrate(cluster, tmp_path / "p.db", "torch 3.0", lines.append)
    assert "measured with torch 2.13.0, here is torch 3.0" in lines[0]


CORES = replace(HERE, device="cpu-core", processor="Epyc, 8 cores")


def test_another_cpu_with_the_same_libraries_is_used_and_said(tmp_path: Path) -> None:
    filled(tmp_path / "p.db", CORES)
    cluster = load_cluster(ROOT / "examples/clusters/cpu_4.yaml")
    lines: list[str] = []
    calibrate(cluster, tmp_path / "p.db", HERE.libraries, lines.append, CORES.processor)
    assert lines == []
    calibrate(cluster, tmp_path / "p.db", HERE.libraries, lines.append, "Epyc, 4 cores")
    assert "measured on Epyc, 8 cores, here is Epyc, 4 cores" in lines[0]
    calibrate(cluster, tmp_path / "p.db", "torch 3.0", lines.append, "Xeon, 4 cores")
    assert (
        "measured with torch 2.13.0 on Epyc, 8 cores, here is torch 3.0 on Xeon, 4 cores"
        in lines[1]
    )


def test_of_several_cpus_the_one_at_hand_is_taken(tmp_path: Path) -> None:
    filled(tmp_path / "p.db", CORES)
    with ProfileDb(tmp_path / "p.db") as db:
        other = replace(CORES, processor="Xeon, 4 cores")
        for size in (1e6, 1e9):
            db.add(other, measurement("all_reduce 4x1", size, 0.0, size / 1e9))
        assert len(db.measurements(CORES)) == 6
        lines: list[str] = []
        for machine in (CORES, other):
            chosen = db.for_device("cpu-core", HERE.libraries, lines.append, machine.processor)
            assert chosen == machine
    assert lines == []


def test_the_cpu_beside_gpus_is_not_compared(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    lines: list[str] = []
    cluster = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    calibrate(cluster, tmp_path / "p.db", HERE.libraries, lines.append, "Xeon, 4 cores")
    assert lines == []


def test_runs_on_a_machine_that_was_not_profiled_do_not_hide_the_profile(tmp_path: Path) -> None:
    filled(tmp_path / "p.db", CORES)
    with ProfileDb(tmp_path / "p.db") as db:
        here = replace(CORES, processor="Xeon, 4 cores")
        db.add(here, measurement("forward measured measured a", 0.0, 0.0, 0.1, "run"))
        lines: list[str] = []
        assert db.for_device("cpu-core", None, lines.append, here.processor) == CORES
    assert "here is Xeon, 4 cores" in lines[0]


def test_a_profile_that_does_not_say_which_cpu_is_taken_on(tmp_path: Path) -> None:
    """Format 2: the same tables without the processor."""
    unnamed = replace(CORES, processor="")
    filled(tmp_path / "p.db", unnamed)
    with closing(sqlite3.connect(tmp_path / "p.db")) as connection:
        connection.execute("ALTER TABLE machine DROP COLUMN processor")
        connection.execute("PRAGMA user_version = 2")
    lines: list[str] = []
    with ProfileDb(tmp_path / "p.db") as db:
        assert len(db.measurements(unnamed)) == 6
        assert db.for_device("cpu-core", None, lines.append, "Xeon, 4 cores") == unnamed
        db.add(CORES, measurement("all_reduce 2x1", 1.0, 0.0, 1e-3))
        assert db.machines() == [unnamed, CORES]
    assert "measured on a CPU that it does not name, here is Xeon, 4 cores" in lines[0]


def test_runs_correct_prices_of_their_own_style(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    with ProfileDb(tmp_path / "p.db") as db:
        for basis, ratio in (("measured", 1.2), ("measured-compiled", 0.8)):
            for what, seconds in (("predicted", 0.1), ("measured", 0.1 * ratio)):
                db.add(HERE, measurement(f"forward {what} {basis} a", 0, 0, seconds, "run"))
    cluster = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    eager = calibrate(cluster, tmp_path / "p.db").device
    compiled = calibrate(cluster, tmp_path / "p.db", style="compiled").device
    assert eager.slower("forward") == pytest.approx(1.2)
    assert compiled.slower("forward") == pytest.approx(0.8)


def test_what_is_done_is_not_measured_again(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    with ProfileDb(tmp_path / "p.db") as db:
        assert ("collective", "all_reduce 8x1", 1e6, 0.0) in db.done(HERE)
        assert not db.done(Machine("H100", "driver 2", "torch 2.13.0"))


def test_another_format_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "p.db")
    with closing(sqlite3.connect(tmp_path / "p.db")) as connection:
        connection.execute("PRAGMA user_version = 1")
    with pytest.raises(ProfileError, match="profile format 1, this tool reads 3"):
        calibrate(load_cluster(ROOT / "examples/clusters/h100_8.yaml"), tmp_path / "p.db")


def test_a_key_of_another_form_is_refused() -> None:
    with pytest.raises(ProfileError, match="'matmul bf16 8x8' is not how this tool writes"):
        op_rates([measurement("matmul bf16 8x8", 1.0, 1.0, 1.0)])


def test_impossible_figures_are_refused(tmp_path: Path) -> None:
    with (
        ProfileDb(tmp_path / "p.db") as db,
        pytest.raises(ProfileError, match="out of any physical range"),
    ):
        db.add(HERE, measurement("all_reduce 8", 1e9, 0.0, 0.0))


def test_a_text_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: x")
    with pytest.raises(ProfileError, match="is a text file, no profile"):
        ProfileDb(path)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.yaml"]
    assert path.read_text() == "name: x"


def test_a_profile_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"unable to open.*a folder that exists"):
        ProfileDb(tmp_path / "nowhere" / "p.db")


def truncated(path: Path) -> bytes:
    """A profile that lost its second half; what is left of it."""
    with ProfileDb(path) as db:
        rows = [measurement(f"all_reduce {i}", 1e6, 0.0, 1e-3) for i in range(600)]
        db.add(HERE, *rows)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    return path.read_bytes()


def test_a_damaged_profile_is_set_aside_and_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    raw = truncated(path)
    lines: list[str] = []
    with ProfileDb(path, lines.append) as db:
        assert 0 < len(db.measurements(HERE)) < 600
        db.add(HERE, measurement("all_reduce 2", 1e6, 0.0, 1e-3))
    assert "was damaged" in lines[0]
    assert path.with_name("p.db.corrupt1").read_bytes() == raw
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.db", "p.db.corrupt1"]


def test_a_damaged_profile_is_not_mended_by_reading(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    raw = truncated(path)
    with pytest.raises(ProfileError, match=r"is damaged .* goes on with what can be read"):
        calibrate(load_cluster(ROOT / "examples/clusters/h100_8.yaml"), path)
    assert path.read_bytes() == raw
    assert [file.name for file in tmp_path.iterdir()] == ["p.db"]


def test_a_file_that_lost_its_head_is_no_profile_any_more(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    raw = b"x" * 100 + truncated(path)[100:]
    path.write_bytes(raw)
    with pytest.raises(ProfileError, match="is a file of another kind, no profile"):
        ProfileDb(path)
    assert path.read_bytes() == raw


def test_what_another_process_is_writing_is_read(tmp_path: Path) -> None:
    """Measurements that SQLite still keeps in its log."""
    with ProfileDb(tmp_path / "p.db") as writing:
        writing.add(HERE, measurement("all_reduce 2", 1e6, 0.0, 1e-3))
        before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.iterdir()}
        with ProfileDb.reading(tmp_path / "p.db") as db:
            assert len(db.measurements(HERE)) == 1
        after = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.iterdir()}
    assert "p.db-wal" in before
    assert after == before


def test_measurements_are_kept_together_or_not_at_all(tmp_path: Path) -> None:
    with ProfileDb(tmp_path / "p.db") as db:
        rows = [measurement(f"all_reduce {i}", 1e6, 0.0, 1e-3) for i in range(3)]
        db.connection.execute(
            "CREATE TEMP TRIGGER full BEFORE INSERT ON measurement "
            "WHEN NEW.key = 'all_reduce 2' BEGIN SELECT RAISE(ABORT, 'database or disk is full'); "
            "END"
        )
        with pytest.raises(ProfileError, match=r"disk is full; give a file in a folder .* space"):
            db.add(HERE, *rows)
        assert db.measurements(HERE) == []
        db.add(HERE, *rows[:2])
        assert len(db.measurements(HERE)) == 2


def test_a_profile_that_others_hold_is_left_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_file, "PATIENCE_S", 0.05)
    path = tmp_path / "p.db"
    filled(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ProfileError, match="database is locked; wait until"):
            ProfileDb(path)
    assert [file.name for file in tmp_path.iterdir()] == ["p.db"]
    with ProfileDb(path) as db:
        assert len(db.measurements(HERE)) == 6


def test_databases_of_others_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="another program's database"):
        ProfileDb(path)
    assert path.read_bytes() == before
    with pytest.raises(ProfileError, match="is a folder"):
        ProfileDb(tmp_path)


def test_other_columns_are_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "p.db")) as connection:
        connection.execute("CREATE TABLE machine (name TEXT)")
        connection.execute("PRAGMA user_version = 3")
    with pytest.raises(ProfileError, match="table machine has columns name, not id, device"):
        ProfileDb(tmp_path / "p.db")


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e30])
def test_figures_in_a_file_that_no_machine_reaches_are_left_out(
    tmp_path: Path, seconds: float
) -> None:
    filled(tmp_path / "p.db")
    with closing(sqlite3.connect(tmp_path / "p.db")) as connection:
        connection.execute("UPDATE measurement SET seconds = ? WHERE size_bytes = 1e6", (seconds,))
        connection.commit()
    lines: list[str] = []
    cluster = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    calibrated = calibrate(cluster, tmp_path / "p.db", warn=lines.append)
    assert "2 measurements out of any physical range are left out" in lines[0]
    assert 1e-5 < collective_time_s(calibrated, "all_reduce", 1e6, AxisGroup(8)) < 1e-2


@pytest.mark.parametrize("group", ["8", "axb", "8x", "0x1"])
def test_a_group_of_another_form_is_refused(group: str) -> None:
    with pytest.raises(ProfileError, match="ranks x stride, as in 4x1"):
        collective_curves([measurement(f"all_reduce {group}", 1e6, 0.0, 1e-3)])


def test_a_product_without_flops_is_refused() -> None:
    with pytest.raises(ProfileError, match="with its FLOPs and bytes"):
        op_rates([measurement("matmul linear forward bf16 8x8", 1.0, 0.0, 1.0, "op")])
