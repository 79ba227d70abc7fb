"""`run --profile` from end to end: a profile that is far off, one run, and a plan that knows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import app as cli
from autopar.cli.profile import driver, libraries, processor
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb
from autopar.files.plan_folder import read_cluster, read_plan
from tests.plans import cluster_text

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar

def batch():
    return {"x": torch.zeros(256, 128), "y": torch.zeros(256, dtype=torch.long)}

@autopar.parallelize(batch=batch)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(128, 512)
        self.outer = nn.Linear(512, 64)

    def forward(self, x, y):
        return F.cross_entropy(self.outer(F.relu(self.inner(x))), y)
"""
TOO_SLOW = 1e5
"""Seconds a GFLOP and a GB in the profile: a core takes about a hundredth of a second, and a
hundred times that where ranks wait for others that use it."""


def misleading(path: Path) -> None:
    """What `autopar profile` would leave on a machine that is millions of times slower."""
    here = Machine("cpu-core", driver(), libraries("torch") or "", processor())
    whole = [("matmul linear", way, 1.0) for way in ("forward", "backward")]
    whole += [
        (f"{op_class} {kind}", way, 0.0)
        for op_class, kind in (("elementwise", "add"), ("reduction", "softmax"))
        for way in ("forward", "backward")
    ]
    whole.append(("update adamw", "forward", 0.0))
    with ProfileDb(path) as db:
        for name, way, flops in whole:
            for size in (1e3, 1e6, 4e6):
                key = f"{name} {way} fp32 {size:g}"
                seconds = 1e-6 + size / 1e9 * TOO_SLOW
                db.add(here, Measurement("op", key, size, flops * size, seconds, 0.1, 9, "2026"))
        for size in (1e3, 1e6, 1e7):
            seconds = 1e-4 + size / 1e9
            key = "all_reduce 2x1"
            db.add(here, Measurement("collective", key, size, 0.0, seconds, 0.1, 9, "2026"))


@pytest.mark.gloo(2)
def test_a_second_plan_expects_what_the_first_one_s_run_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def autopar(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["autopar", *words, "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        printed: dict[str, Any] = json.loads(out)
        return printed

    def predicted(folder: str) -> dict[str, float]:
        prediction = read_plan(tmp_path / folder).prediction
        return {
            "forward": prediction.forward_time_s,
            "backward": prediction.backward_time_s,
            "optimizer": prediction.optimizer_time_s,
        }

    def off(foreseen: Mapping[str, float], took: Mapping[str, float]) -> dict[str, float]:
        return {phase: abs(math.log(foreseen[phase] / took[phase])) for phase in foreseen}

    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("cluster.yaml").write_text(cluster_text(2))
    misleading(tmp_path / "here.db")
    plan = ["plan", "model.py", "--cluster", "cluster.yaml", "--profile", "here.db"]
    plan += ["--fix", "dp_replicate=2"]
    autopar(*plan, "-o", "first")
    ran = autopar("run", "first", "--steps", "8", "--device", "cpu", "--profile", "here.db")
    took = dict(ran["phases_s"])
    took["backward"] += took.pop("exchange")
    autopar(*plan, "-o", "second")
    priced = autopar("estimate", *plan[1:])
    assert priced["step_time_s"] == read_plan("second").prediction.step_time_s
    assert dict(read_cluster("second").device.fitted).keys() == predicted("first").keys()
    before, after = off(predicted("first"), took), off(predicted("second"), took)
    # A thousand times off and more before, on a busy machine too; within a factor of two after.
    assert all(far > math.log(1000) for far in before.values()), before
    assert all(near < math.log(2) for near in after.values()), after
