"""``autopar show``: a model's graph, a plan, and what follows from both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cli.show import text_of
from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.nouns.text import graph as graph_text
from autopar.report.opened import opened
from tests.cli.test_cli import run
from tests.files.test_plan_checks import made
from tests.text import reading_lowered, reading_plans


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("checkout"))


def test_of_a_plan_its_decisions_and_what_follows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("show", str(folder), monkeypatch=monkeypatch) == 0
    plan, lowered = capsys.readouterr().out.split("\n\n")
    assert reading_plans.from_text(plan) == plan_folder.read_plan(folder)
    assert reading_lowered.from_text(lowered) == opened(folder).lowered


def test_the_graph_of_a_plan_is_that_of_its_model(folder: Path) -> None:
    graph = text_of(str(folder), "graph", None)
    assert graph == text_of(str(folder.parents[1] / "models" / "net.py"), None, None)
    assert graph_text.from_text(graph) == plan_folder.read_graph(folder)
    assert " net.py:" in graph
    assert str(folder.parents[1]) not in graph


def test_a_stage_alone(folder: Path) -> None:
    whole, only = (text_of(str(folder), *asked) for asked in (("lowered", None), (None, 0)))
    assert reading_lowered.from_text(only) == reading_lowered.from_text(whole)
    with pytest.raises(UserError, match=r"--stage 1: .* has stages 0 to 0"):
        text_of(str(folder), None, 1)


@pytest.mark.parametrize(
    ("form", "stage", "message"),
    [
        ("tree", None, "--as tree: choose graph, plan, lowered"),
        ("plan", 0, "--stage is of what is lowered; --as plan has all stages"),
    ],
)
def test_what_cannot_be_shown(folder: Path, form: str, stage: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        text_of(str(folder), form, stage)


def test_a_model_has_no_plan(folder: Path) -> None:
    model = str(folder.parents[1] / "models" / "net.py")
    with pytest.raises(UserError, match=r"is a model, which has a graph alone; .* `autopar plan"):
        text_of(model, "lowered", None)


def test_a_decision_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    for file in ("cluster.json", "graph.txt", "batch.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    data = json.loads((folder / "plan.json").read_text())
    op = next(iter(data["spreads"][0]["ops"]))
    data["spreads"][0]["ops"][op] = "tp:zz"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(plan_folder.PlanFolderError, match=r"is 'tp:zz'; allowed: whole"):
        text_of(str(tmp_path), None, None)


def test_a_graph_that_was_broken_is_told_by_its_line(folder: Path, tmp_path: Path) -> None:
    for file in ("cluster.json", "plan.json", "batch.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    text = (folder / "graph.txt").read_text()
    (tmp_path / "graph.txt").write_text(text.replace(" = relu(", " = relu "))
    message = r"graph\.txt cannot be read \(line \d+, column \d+: expected '\(', there is "
    with pytest.raises(plan_folder.PlanFolderError, match=message):
        text_of(str(tmp_path), "graph", None)
