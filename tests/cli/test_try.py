"""`autopar plan --try`: what runs here is run, and the fastest is what is written."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from autopar.cli import app as cli
from autopar.cli import tries
from autopar.files import plan_folder
from tests.cli.test_bad_input import MODEL
from tests.plans import cluster_text

H100 = Path(__file__).parents[2] / "examples" / "clusters" / "h100_8.yaml"


def planned(
    where: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, *more: str
) -> tuple[int, list[str]]:
    (where / "model.py").write_text(textwrap.dedent(MODEL))
    monkeypatch.chdir(where)
    code = called(monkeypatch, "plan", "model.py", "-c", cluster, "-o", "plan", *more)
    return code, sorted(path.name for path in where.iterdir())


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autopar", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.gloo(2)
def test_the_fastest_is_kept_and_what_was_measured_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster_text(2))
    code, left = planned(tmp_path, monkeypatch, "cluster.yaml", "--try", "2")
    assert code == 0
    assert left == ["cluster.yaml", "model.py", "plan"]  # those tried are gone
    out, _ = capfd.readouterr()
    assert "Tried on the devices at hand" in out
    tried = json.loads((tmp_path / "plan" / "tried.json").read_text())
    assert len(tried) == 2
    fastest = min(tried, key=lambda one: float(one["measured_s"]))
    assert [one["layout"] for one in tried if one["kept"]] == [fastest["layout"]]
    assert all(len(one["runs_s"]) == 2 and min(one["runs_s"]) > 0 for one in tried)
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["prediction"]["step_time_s"] == fastest["predicted_s"]


@pytest.mark.gloo(2)
def test_a_plan_that_stands_is_tuned_and_may_be_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster_text(2))
    monkeypatch.setattr(tries, "kept", lambda tried: len(tried) - 1)  # whatever is fast today
    assert planned(tmp_path, monkeypatch, "cluster.yaml")[0] == 0
    plan = tmp_path / "plan"
    first = plan_folder.read_plan(plan)
    assert called(monkeypatch, "tune", "plan", "--try", "2") == 0
    assert "Tried on the devices at hand" in capfd.readouterr().out
    now = plan_folder.read_plan(plan)
    assert (now.degrees, now.stages[0].zero) != (first.degrees, first.stages[0].zero)
    assert now.cluster_file == first.cluster_file
    assert now.fingerprints.cluster_file == first.fingerprints.cluster_file
    assert len(json.loads((plan / "tried.json").read_text())) == 2
    assert called(monkeypatch, "run", "plan", "--steps", "1") == 0
    assert planned(tmp_path, monkeypatch, "cluster.yaml")[0] == 0  # over what was tried
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "model.py", "plan"]
    assert not (plan / "tried.json").exists()


def test_there_must_be_something_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster_text(2))
    fixed = "dp_replicate=2,dp_shard=1,tp=1,pp=1,zero=0,recompute=none,offload=none"
    assert planned(tmp_path, monkeypatch, "cluster.yaml", "--fix", fixed)[0] == 0
    assert called(monkeypatch, "tune", "plan") == 2
    assert "names no layout beside its own to try" in capfd.readouterr().err


def test_nothing_is_tried_for_devices_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, left = planned(tmp_path, monkeypatch, str(H100), "--try", "3")
    assert (code, left) == (2, ["model.py"])
    _, err = capfd.readouterr()
    assert "the plan is for 8 GPUs, this machine has 0" in err
