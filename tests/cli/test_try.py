"""`autopar plan --try`: what runs here is run, and the fastest is what is written."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from autopar.cli import app as cli
from tests.cli.test_bad_input import MODEL
from tests.plans import cluster_text

H100 = Path(__file__).parents[2] / "examples" / "clusters" / "h100_8.yaml"


def planned(
    where: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, *more: str
) -> tuple[int, list[str]]:
    (where / "model.py").write_text(textwrap.dedent(MODEL))
    monkeypatch.chdir(where)
    words = ["autopar", "plan", "model.py", "-c", cluster, "-o", "plan", *more]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), sorted(path.name for path in where.iterdir())


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


def test_nothing_is_tried_for_devices_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, left = planned(tmp_path, monkeypatch, str(H100), "--try", "3")
    assert (code, left) == (2, ["model.py"])
    _, err = capfd.readouterr()
    assert "the plan is for 8 GPUs, this machine has 0" in err
