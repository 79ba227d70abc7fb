"""The way of docs/architecture.md from a collective to what decides it can be walked."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from autopar.cli import app

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"`((?:autopar|runtime)/[\w/]+\.py)`")


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["autopar", *words])
    with suppress(SystemExit):
        app.main()


def test_every_line_stands_where_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    walk = text.split("## From a collective")[1].split("\n## ")[0]
    (command,) = re.findall(r"^    autopar (.+)$", walk, re.M)
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "plan"
    called(monkeypatch, *shlex.split(command), "-o", str(folder))
    capsys.readouterr()
    called(monkeypatch, "show", str(folder))
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    program = "".join(file.read_text() for file in (folder / "program").glob("*.py"))
    for line in re.findall(r"`((?:h = |state\.backward).+?)`", walk, re.S):
        assert re.sub(r"\s+", " ", line) in re.sub(r"\s+", " ", program)
    rows = [row.split(" | ") for row in walk.splitlines() if row.startswith("| `")]
    assert len(rows) == 11
    for where, what, *_ in rows:
        for line in re.findall(r"`([^`]+)`", what):
            if "autopar show plan" in where:
                assert line in shown, line
            else:
                (file,) = FILE.findall(where)
                assert line in (ROOT / file).read_text(), (file, line)
