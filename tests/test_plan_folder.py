"""A plan's folder is written whole or not at all, and never over somebody else's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import plan_folder
from autopar.plan_folder import PlanFolderError


def test_write_replaces_the_whole_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "plan"
    plan_folder.write(folder, {"plan.json": "1", "program/old.py": "a"})
    plan_folder.write(folder, {"plan.json": "2", "program/new.py": "b"})
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
        "plan.json",
        "program/new.py",
    }
    assert (folder / "plan.json").read_text() == "2"
    assert [p.name for p in folder.parent.iterdir()] == ["plan"]


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    plan_folder.write(folder, {"plan.json": "1"})
    with pytest.raises(PlanFolderError, match="cannot write"):
        plan_folder.write(folder, {"plan.json": "2", "plan.json/impossible": "3"})
    assert (folder / "plan.json").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(PlanFolderError, match=r"thesis\.tex"):
        plan_folder.write(tmp_path, {"plan.json": "1"})
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    with pytest.raises(PlanFolderError, match="is a file"):
        plan_folder.write(tmp_path / "thesis.tex", {"plan.json": "1"})


def test_reading_what_is_no_plan_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PlanFolderError, match=r"autopar plan model\.py"):
        plan_folder.read_plan(tmp_path)
    (tmp_path / "plan.json").write_text('{"format": 99}')
    with pytest.raises(PlanFolderError, match="format 99"):
        plan_folder.read_plan(tmp_path)
    (tmp_path / "plan.json").write_text('{"format"')
    with pytest.raises(PlanFolderError, match="plan the model again"):
        plan_folder.read_plan(tmp_path)
