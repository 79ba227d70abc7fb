"""Compiling ahead: what a compiler is told, what stands in for devices, what cannot be compiled."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.compiling import described
from autopar.files.cluster_file import cluster_from_text
from autopar.lowering.collectives import Row
from autopar.nouns.errors import UserError
from autopar.nouns.prediction import Memory
from autopar.report.compiled import compiled_object, compiled_parts
from autopar.report.render import to_text
from autopar.runtime.ahead import compile_job
from autopar.runtime.ahead import described as devices
from autopar.runtime.ahead.compile_job import Compiled
from autopar.runtime.ahead.described import CannotCompile, Described, environment, standing_in

V5E = Described("tpu", 16, "v5e:4x4", (False, False))
MEMORY = Memory(1200, 400, 0, 600, 200, 0, 16_000)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("slice: v5e-4x4", V5E),
        ("slice: v5e-8x16", Described("tpu", 128, "v5e:8x16", (False, True))),
        (
            "slice: v5p-4x4x4\nslices: 2",
            Described("tpu", 128, "v5p:4x4x4", (True, True, True), 2),
        ),
        ("slice: tpu7x-2x2x1", Described("tpu", 8, "tpu7x:2x2x1", (False,) * 3)),
        (
            "groups: [{device: cpu-core, count: 4}]\n"
            "levels: [{name: a, span: 4, bandwidth: 1 GB/s, latency: 1 us}]",
            Described("cpu", 4),
        ),
    ],
)
def test_what_a_compiler_is_told_of_a_cluster(text: str, target: Described) -> None:
    assert described(cluster_from_text(text)) == target
    assert Described.from_dict(target.as_dict()) == target


@pytest.mark.parametrize(
    ("device", "says"),
    [("H100", "no compiler for 4 H100 without one"), ("TPU-v5e", "no level that is the torus")],
)
def test_what_nothing_compiles_for(device: str, says: str) -> None:
    text = f"groups: [{{device: {device}, count: 4}}]\n"
    text += "levels: [{name: a, span: 4, bandwidth: 1 GB/s, latency: 1 us}]"
    with pytest.raises(UserError, match=says):
        described(cluster_from_text(text))


def test_without_libtpu_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotCompile, match=r"no compiler for v5e:4x4, 16 devices .*pip install"):
        devices.devices_of(V5E)


def test_a_topology_that_libtpu_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import topologies

    def refuse(**_: Any) -> None:
        raise RuntimeError("INVALID_ARGUMENT: no such\nsecond line")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(
        CannotCompile, match=r"knows no topology v5e:4x4: INVALID_ARGUMENT: no such"
    ):
        devices.devices_of(V5E)


def test_nobody_is_asked_which_devices_there_are() -> None:
    import jax

    one = Described("cpu", 1)
    (device,) = devices.devices_of(one)
    with standing_in(one, [device]):
        assert jax.devices() == jax.local_devices() == [device]
        assert (jax.device_count(), jax.default_backend()) == (1, "cpu")
        mesh = jax.make_mesh((1, 1), ("a", "b"))
    assert mesh.devices.tolist() == [[device]]
    assert jax.device_count() >= 1


def test_the_environment_is_that_of_the_platform() -> None:
    assert "device_count=4" in environment(Described("cpu", 4))["XLA_FLAGS"]
    assert environment(V5E)["TPU_SKIP_MDS_QUERY"] == "1"


def test_a_compiler_that_dies_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CannotCompile, match="ended with exit code 1 and no result"):
        compile_job.check(V5E)


def test_of_the_modules_that_libtpu_wrote_the_largest_is_the_steps(tmp_path: Path) -> None:
    for name, text in (
        ("1-TLP-hlo.txt", "small"),
        ("2-TLP-hlo.txt", "the step"),
        ("3.txt", "x" * 99),
    ):
        (tmp_path / name).write_text(text)
    assert compile_job._dumped(str(tmp_path)) == "the step"
    with pytest.raises(FileNotFoundError, match="no module"):
        compile_job._dumped(str(tmp_path / "none"))


def compiled(*rows: Row, unread: str = "") -> Compiled:
    return Compiled(str(V5E), "libtpu 1", 2.0, 1000, 190, 10, 5, rows, unread)


def planned(*rows: Row) -> list[dict[str, Any]]:
    return [{"kind": r.kind, "axis": r.axis, "size_bytes": r.size_bytes, "count": 1} for r in rows]


def test_memory_and_collectives_stand_beside_the_plan() -> None:
    made = compiled(Row("all_gather", "dp", 4096, 2), Row("all_reduce", "dp", 4200, 1))
    rows = planned(Row("all_gather", "dp", 8192, 1), Row("reduce_scatter", "dp", 4096, 1))
    text = to_text(compiled_parts(made, MEMORY, rows))
    assert "Compiled ahead for v5e:4x4, 16 devices by libtpu 1" in text
    assert "0 %" in text  # 1200 both ways
    lines = {line.split()[0]: line for line in text.splitlines() if " dp " in line}
    assert "an all-reduce and a slice" in lines["reduce_scatter"]
    assert "of reduce-scatters" in lines["all_reduce"]
    assert "than" not in lines["all_gather"]
    data = compiled_object(made, MEMORY, rows)
    assert data["memory_bytes"]["total"] == data["memory_bytes"]["planned"] == 1200
    assert {"kind": "all_gather", "axis": "dp", "compiled_bytes": 8192, "planned_bytes": 8192} in (
        data["collectives"]
    )


def test_other_bytes_are_named() -> None:
    made = compiled(Row("all_gather", "tp", 4096, 2))
    text = to_text(compiled_parts(made, MEMORY, planned(Row("all_gather", "tp", 4096, 1))))
    assert "more than planned" in text


def test_a_module_that_cannot_be_read_leaves_the_memory() -> None:
    text = to_text(compiled_parts(compiled(unread="no text"), MEMORY, []))
    assert "Collectives are not known: no text." in text
    assert "total" in text


@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        (Described("tpu", 64, "v5p:4x4x4", (True,) * 3), {"a": 2, "b": 32}),
        (Described("tpu", 16, "v6e:4x4", (False,) * 2), {"a": 2, "b": 8}),
        (Described("tpu", 16, "v5e:2x4", (False,) * 2, 2), {"a": 4, "b": 4}),
    ],
)
def test_programs_make_meshes_that_jax_make_mesh_refuses(
    target: Described, sizes: dict[str, int]
) -> None:
    pytest.importorskip("libtpu")
    from autopar.runtime.jax.parallel import make_mesh

    for name, text in environment(target).items():  # of a process of its own, elsewhere
        os.environ.setdefault(name, text)
    made = devices.devices_of(target)
    with standing_in(target, made):
        mesh = make_mesh(**sizes)
    slices = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    assert slices == sorted(slices)
    assert len(set(mesh.devices.flat)) == target.devices
