"""The contest's command: its table, its files, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.nouns.problem import Problem
from benchmarks import contest_format, iopddl
from benchmarks.iopddl import Row, main
from tests.searchers.problems import layered


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Problem]:
    """One instance, T, with a made-up best known value."""
    problem = layered(12, 4, seed=0, limit=0.4)
    contest_format.dump(problem, tmp_path / "contest-T.json.gz")
    header = "instance,time_limit_s,best_known_within_limit"
    (tmp_path / "best_known.csv").write_text(f"{header}\nT,60,100000\n")
    return tmp_path, problem


def test_an_answer_is_printed_and_saved(
    folder: tuple[Path, Problem], capfd: pytest.CaptureFixture[str]
) -> None:
    path, problem = folder
    assert main([str(path), "--save", str(path / "saved"), "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["rows"]
    choice = np.array(json.loads((path / "saved" / "T.json").read_text()))
    assert problem.feasible(choice)
    assert problem.total(choice) == row["cost"] == row["bound"]
    assert row["score"] == 100000 / row["cost"]
    assert row["gap"] == 0.0
    assert 0 < row["seconds"] < 60
    assert row["peak_mb"] > 10
    assert row["searcher"].startswith("portfolio")


def test_the_best_seed_is_saved(
    folder: tuple[Path, Problem], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = folder
    costs = {0: 7, 1: 5, 2: 4, 3: 6}

    def answered(options: Any, name: str, path: Path, known: Any, seed: int) -> tuple[Row, Any]:
        error = "infeasible" if seed == 2 else ""
        row = Row(name, seed, costs[seed], None, None, None, None, 1.0, 1.0, None, 1.0, "", error)
        return row, [seed]

    monkeypatch.setattr(iopddl, "_run", answered)
    main([str(path), "--save", str(path / "saved"), "--seeds", "0,1,2,3"])
    assert json.loads((path / "saved" / "T.json").read_text()) == [1]
    assert "T.json is the best answer, of seed 1: cost 5" in capfd.readouterr().out


def test_no_feasible_answer_is_an_error(
    folder: tuple[Path, Problem], capfd: pytest.CaptureFixture[str]
) -> None:
    path, problem = folder
    contest_format.dump(replace(problem, usage_limit=0), path / "contest-U.json")
    assert main([str(path), "--instances", "U", "--searcher", "elimination"]) == 1
    assert "NoFeasibleAnswer: the usage limit 0 is too low" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "no instances"),
        ([".", "--instances", "T,X"], "no instance X"),
        ([".", "--csv", "nowhere.csv"], "no such file"),
    ],
)
def test_what_is_not_there_is_said(
    folder: tuple[Path, Problem],
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder[0])
    assert main(arguments) == 2
    assert expected in capfd.readouterr().err
