"""Naming a file to read changes nothing: not the file, nor its folder; and one message says why."""

from __future__ import annotations

import os
import sqlite3
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from autopar.cli import app as cli
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb
from tests.cli.test_bad_input import MODEL
from tests.plans import cluster_text

GIVEN = "given/name.py"
"""What the option names; ``.py`` so that it may be a model too."""
OPTIONS = {
    "plan MODEL": ("plan", GIVEN, "-c", "cluster.yaml", "-o", "plan"),
    "plan --cluster": ("plan", "model.py", "--cluster", GIVEN, "-o", "plan"),
    "plan --profile": ("plan", "model.py", "-c", "cluster.yaml", "--profile", GIVEN, "-o", "plan"),
    "estimate MODEL": ("estimate", GIVEN, "-c", "cluster.yaml"),
    "estimate --cluster": ("estimate", "model.py", "--cluster", GIVEN),
    "estimate --profile": ("estimate", "model.py", "-c", "cluster.yaml", "--profile", GIVEN),
    "estimate --arch": ("estimate", "--arch", GIVEN, "-c", "cluster.yaml"),
    "run PLAN": ("run", GIVEN, "--steps", "1"),
    "verify PLAN": ("verify", GIVEN),
    "explain PLAN": ("explain", GIVEN),
    "diff A": ("diff", GIVEN, "plan"),
    "profile --cluster": ("profile", "--cluster", GIVEN, "-o", "profile.db"),
}
WRITE_OPTIONS = {
    "profile -o": ("profile", "--cluster", "cluster.yaml", "-o", GIVEN),
    "plan -o": ("plan", "model.py", "-c", "cluster.yaml", "-o", GIVEN),
}


def foreign(path: Path, mode: str = "DELETE") -> None:
    """A database of another program."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("CREATE TABLE machine (song TEXT)")
        connection.execute("INSERT INTO machine VALUES ('here')")
        connection.commit()


def with_a_journal(path: Path) -> None:
    """A database whose last write was cut off: whoever opens it finishes that."""
    foreign(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        for _ in range(200):
            connection.execute("INSERT INTO machine VALUES (?)", ("x" * 500,))
        left = {f.name: f.read_bytes() for f in path.parent.iterdir()}
        connection.execute("ROLLBACK")
    for name, content in left.items():
        (path.parent / name).write_bytes(content)
    assert len(left) == 2, left.keys()


def damaged_profile(path: Path) -> None:
    with ProfileDb(path) as db:
        here = Machine("cpu-core", "driver", "torch")
        rows = [Measurement("op", f"x {i}", 1.0, 1.0, 1.0, 0.0, 1, "2026") for i in range(300)]
        db.add(here, *rows)
    path.write_bytes(path.read_bytes()[:9000])


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def other_plan(path: Path) -> None:
    path.mkdir()
    (path / "plan.json").write_bytes(b"\xff\xfe\x00 no text")


CONTENTS: dict[str, Callable[[Path], object]] = {
    "nothing there": lambda path: None,
    "an empty file": Path.touch,
    "a text": lambda path: path.write_text("years = 'of work'\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "a list": lambda path: path.write_text("[1, 2, 3]\n"),
    "deep brackets": lambda path: path.write_text("[" * 500),
    "a folder": Path.mkdir,
    "a folder with bytes for a plan": other_plan,
    "a pipe": os.mkfifo,
    "a loop of links": loop,
    "a database of others": foreign,
    "a database of others with a log": lambda path: foreign(path, "WAL"),
    "a database whose write was cut off": with_a_journal,
    "a damaged profile": damaged_profile,
}


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Kind, time of the last change and content of everything in and below ``folder``."""
    entries = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        stat = path.lstat()
        regular = path.is_file() and not path.is_symlink()
        content = path.read_bytes() if regular else b""
        entries[str(path)] = (stat.st_mode, stat.st_mtime_ns, content)
    return entries


def called(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """The exit code and what stands on stderr."""
    monkeypatch.setattr(sys, "argv", ["autopar", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, capsys.readouterr().err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "cluster.yaml").write_text(cluster_text(4))
    (tmp_path / "given").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "given"


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("option", [*OPTIONS, *WRITE_OPTIONS])
@pytest.mark.some(98)
def test_a_file_that_cannot_be_used_stays_as_it_is(
    place: Path,
    option: str,
    content: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if option in WRITE_OPTIONS and content in ("nothing there", "an empty file", "a folder"):
        pytest.skip("may be written")
    if option == "profile -o" and content == "a damaged profile":
        pytest.skip("is set aside")
    CONTENTS[content](Path(GIVEN))
    before = tree(place)
    code, printed = called({**OPTIONS, **WRITE_OPTIONS}[option], monkeypatch, capsys)
    assert tree(place) == before
    assert code == 2, printed
    assert printed.count("autopar: ") == 1
    assert "name.py" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["n" * 300, "model.py/name.py", "nul\0byte", ""])
def test_names_that_no_file_can_have(
    place: Path,
    option: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = tuple(name if word == GIVEN else word for word in OPTIONS[option])
    before = tree(place)
    code, printed = called(words, monkeypatch, capsys)
    assert tree(place) == before
    assert code == 2, printed
    assert "Traceback" not in printed
