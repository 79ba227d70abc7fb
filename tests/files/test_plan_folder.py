"""A plan's folder is written whole or not at all, and never over somebody else's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.files import plan_folder, whole_folder
from autopar.files.plan_folder import PlanFolderError


def plan_text(number: int) -> str:
    return json.dumps({"format": 2, "workload": f"model{number}.py"})


def test_write_replaces_the_whole_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "plan"
    plan_folder.write(folder, {"plan.json": plan_text(1), "program/model.py": "a"})
    plan_folder.write(folder, {"plan.json": plan_text(2), "program/train.py": "b"})
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
        "plan.json",
        "program/train.py",
    }
    assert (folder / "plan.json").read_text() == plan_text(2)
    assert [p.name for p in folder.parent.iterdir()] == ["plan"]


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    plan_folder.write(folder, {"plan.json": plan_text(1)})
    with pytest.raises(PlanFolderError, match="cannot write"):
        plan_folder.write(folder, {"plan.json": plan_text(2), "plan.json/impossible": "3"})
    assert (folder / "plan.json").read_text() == plan_text(1)
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(PlanFolderError, match=r"thesis\.tex"):
        plan_folder.write(tmp_path, {"plan.json": "1"})
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    with pytest.raises(PlanFolderError, match="is a file"):
        plan_folder.write(tmp_path / "thesis.tex", {"plan.json": "1"})


@pytest.mark.parametrize(
    "mine",
    [
        {"program/train.py": "my own training"},
        {"report.txt": "my own report", "program/notes.md": ""},
        {"plan.json": '{"my": "settings"}'},
        {"cluster.json": "{}"},
    ],
)
def test_files_that_only_have_a_plans_names_stay(tmp_path: Path, mine: dict[str, str]) -> None:
    for name, text in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(PlanFolderError, match="did not write"):
        plan_folder.write(tmp_path, {"plan.json": plan_text(1)})
    assert {name: (tmp_path / name).read_text() for name in mine} == mine


def test_what_a_person_added_to_a_plan_stays(tmp_path: Path) -> None:
    program = {"program/model.py": "as planned"}
    digests = {name: whole_folder.digest(text.encode()) for name, text in program.items()}
    files = {"plan.json": plan_text(1), "collectives.json": json.dumps({"program": digests})}
    folder = tmp_path / "plan"
    plan_folder.write(folder, files | program)
    plan_folder.write(folder, files | program)
    (folder / "program" / "notes.md").write_text("why")
    with pytest.raises(PlanFolderError, match=r"program/notes\.md"):
        plan_folder.write(folder, files | program)
    (folder / "program" / "notes.md").unlink()
    (folder / "program" / "model.py").write_bytes(b"\xff is no text")
    with pytest.raises(PlanFolderError, match=r"program/model\.py was edited"):
        plan_folder.write(folder, files | program)
    (folder / "program" / "model.py").write_text("better")
    with pytest.raises(PlanFolderError, match=r"program/model\.py was edited"):
        plan_folder.write(folder, files | program)
    assert (folder / "program" / "model.py").read_text() == "better"


def test_reading_what_is_no_plan_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PlanFolderError, match=r"autopar plan model\.py"):
        plan_folder.read_plan(tmp_path)
    (tmp_path / "plan.json").write_text('{"format": 99}')
    with pytest.raises(PlanFolderError, match="format 99"):
        plan_folder.read_plan(tmp_path)
    (tmp_path / "plan.json").write_text('{"format"')
    with pytest.raises(PlanFolderError, match="plan the model again"):
        plan_folder.read_plan(tmp_path)
