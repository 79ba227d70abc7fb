"""Every example is planned, trained and verified on four processes, by the commands it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CLUSTER = "examples/clusters/cpu_4.yaml"
STEPS = 8


def autopar(*words: str) -> dict[str, Any]:
    """The one object that a command prints on stdout."""
    command = [sys.executable, "-m", "autopar.cli", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_examples_are_numbered_without_gaps() -> None:
    assert [int(file.name[:2]) for file in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))


@pytest.mark.gloo
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.stem)
def test_example_is_planned_trained_and_verified(example: Path, tmp_path: Path) -> None:
    folder, model = str(tmp_path / "plan"), str(example.relative_to(ROOT))
    planned = autopar("plan", model, "--cluster", CLUSTER, "-o", folder)
    assert planned["unruled_ops"] == []
    assert planned["step_time_s"] >= planned["lower_bound_s"] > 0
    written = {file.name for file in (tmp_path / "plan").iterdir()}
    assert {"plan.json", "cluster.json", "graph.json", "collectives.json"} <= written
    assert list((tmp_path / "plan" / "program").glob("*.py"))

    trained = autopar("run", folder, "--steps", str(STEPS))
    assert len(trained["losses"]) == STEPS
    assert trained["losses"][-1] < trained["losses"][0]

    verified = autopar("verify", folder)
    assert verified["ranks"] == 4
    for error in ("loss_rel_err", "max_grad_rel_err", "max_weight_rel_err"):
        assert verified[error] < 1e-9
    assert verified["collectives_match"] is True

    why = autopar("explain", folder)
    assert {op["key"] for op in why["ops"]}
