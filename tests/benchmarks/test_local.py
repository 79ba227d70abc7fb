"""The local benchmark: one plan that fails costs its own row, equal plans run once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from autopar.files import plan_folder
from autopar.nouns.plan import Stage, to_json
from autopar.runtime.jobs.failures import RankFailed
from autopar.runtime.jobs.result import RunResult
from benchmarks import core_share, local, two_hosts
from tests import plans


def test_a_plan_that_fails_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {}
    for number, layout in enumerate(("tp", "ZeRO 1", local.FREE)):
        zero = 1 if layout == "ZeRO 1" else 0
        folders[layout] = tmp_path / str(number)
        plan = plans.plan(stages=(Stage(zero=zero),))
        plan_folder.write(folders[layout], {"plan.json": to_json(plan)})
    ran: list[Path] = []

    def run(folder: Path, steps: int, **_: object) -> RunResult:
        ran.append(folder)
        if folder == folders["ZeRO 1"]:
            raise RankFailed("rank 0 of 4 failed\nSyntaxError: no")
        return RunResult((1.0,), 0.2, 0.1, 4, steps, 1 << 20)

    monkeypatch.setattr(local, "run", run)
    runs, failed = local.measure("mlp", folders, steps=3, rounds=2, launcher=None)
    assert failed == {"ZeRO 1": "SyntaxError: no"}
    assert ran == [folders["tp"], folders["ZeRO 1"], folders["tp"]]
    assert runs[local.FREE] == runs["tp"]
    rows = local.rows_of("mlp", folders, runs)
    assert [row["layout"] for row in rows] == ["tp", local.FREE]
    met = {target.name: target for target in local.targets(rows, len(failed))}
    assert met["plans that did not run"].value == 1
    assert met["the planner's choice, times the best measured"].value == 1.0
    assert "mlp, tp, round 1 of 2" in capsys.readouterr().err


def test_two_hosts_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert two_hosts.missing() == "root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "iproute2" in two_hosts.missing()


def test_processes_have_a_core_each_or_share_one_with_their_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cores(count: int, processes: int) -> list[int]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
        return [core_share.core_of(rank, processes) for rank in range(processes)]

    assert cores(8, 4) == cores(4, 4) == [0, 1, 2, 3]
    assert cores(2, 4) == [0, 0, 1, 1]
    assert cores(3, 4) == [0, 0, 1, 2]


def test_a_machine_without_control_groups_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core_share, "_FIRST", tmp_path / "none")
    monkeypatch.setattr(core_share, "_SECOND", tmp_path / "none either")
    assert "control groups with a CPU quota" in core_share.missing()
