"""The wheel holds every file of the package, those behind the links under their import names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = ("searchers", "cost_models", "runtime")
SUFFIXES = {".py", ".yaml", ".json", ".csv", ".typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names inside a wheel built from a copy, so that no build folder appears in the tree."""
    copy = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("autopar", *MAPPED):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (copy / "dist").glob("*.whl")
    return set(zipfile.ZipFile(file).namelist())


def test_the_wheel_holds_every_file(wheel: set[str]) -> None:
    expected = {
        f"autopar/{file.relative_to(ROOT).as_posix()}"
        for top in MAPPED
        for file in (ROOT / top).rglob("*")
        if file.suffix in SUFFIXES and "__pycache__" not in file.parts
    } | {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "autopar").rglob("*")
        if file.suffix in SUFFIXES
        and "__pycache__" not in file.parts
        and not (ROOT / "autopar" / file.relative_to(ROOT / "autopar").parts[0]).is_symlink()
    }
    assert {name for name in wheel if name.startswith("autopar/")} == expected


def test_the_wheel_holds_nothing_else(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"autopar"}
