"""What other memory would buy: more is never slower, and what there is gives the plan again."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.files import plan_folder
from autopar.report.memories import bought
from tests.cli.test_cli import run
from tests.files.test_plan_checks import made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("checkout"))


def test_more_memory_is_never_slower(folder: Path) -> None:
    own = plan_folder.read_cluster(folder).device.memory_bytes
    rows = bought(folder, [1, own // 2, 2 * own])
    assert [row.memory_bytes for row in rows] == [1, own // 2, own, 2 * own]
    assert rows[0].best is None
    times = [row.best.priced.time.total_s for row in rows[1:] if row.best is not None]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)


def test_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("explain", str(folder), "--memory", "1MiB,64GiB", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "nothing fits" in out
    assert "(there is)" in out
    assert run("explain", str(folder), "--memory", "64", monkeypatch=monkeypatch) == 2
    assert "--memory 64: '64' has no unit" in capsys.readouterr().err
