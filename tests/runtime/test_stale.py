"""What has changed since a plan was made is told by its name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.files import plan_folder
from autopar.frontends.loading import load_workload
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload, training
from autopar.runtime.pytorch.training.load import check_model_of
from autopar.runtime.shared.settings import StaleSettings, changed_training
from autopar.runtime.shared.stale import StalePlan
from tests.runtime import folders

MODEL = """
import torch
from torch import nn
import autopar

ROWS, STD = 8, 0.02

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 32)
        nn.init.normal_(self.inner.weight, std=STD)  # small

    def forward(self, x):
        return self.inner(x).square().mean()

workload = autopar.Workload(
    model=lambda: Model(), batch=lambda: {"x": torch.zeros(ROWS, 16)}, clip_norm=1.0
)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


@pytest.fixture
def folder(model: Path) -> Path:
    return folders.write(model.parent / "plan", {"dp_shard": 1}, workload=str(model))


def planned(folder: Path, workload: Workload) -> Plan:
    plan = plan_folder.read_plan(folder)
    return replace(plan, fingerprints=replace(plan.fingerprints, training=training(workload)))


CHANGES: dict[str, tuple[Any, str]] = {
    "learning_rate": (2e-3, "learning_rate is 0.002 and was 0.001 when"),
    "weight_decay": (0.1, "weight_decay is 0.1 and was 0.01 when"),
    "betas": ((0.9, 0.95), r"betas is \(0.9, 0.95\) and was \(0.9, 0.999\) when"),
    "eps": (1e-6, "eps is 1e-06 and was 1e-08 when"),
    "seed": (3, "seed is 3 and was 0 when"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_leave_the_plan_good_are_told_and_used(
    folder: Path, model: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, pattern = CHANGES[name]
    workload = load_workload(str(model))
    plan = planned(folder, workload)
    assert changed_training(plan, workload) == []
    check_model_of(plan, replace(workload, **{name: value}), folder)
    printed = capsys.readouterr().err
    assert printed.count("note:") == 1
    assert re.search(pattern, printed), printed


@pytest.mark.parametrize("name", ["optimizer", "clip_norm", "precision"])
def test_settings_that_the_plan_rests_on_are_refused(folder: Path, model: Path, name: str) -> None:
    values: dict[str, Any] = {"optimizer": "sgd", "clip_norm": 2.0, "precision": "bfloat16"}
    workload = load_workload(str(model))
    with pytest.raises(StaleSettings, match=f"{name} is .* and was .* Plan it again"):
        check_model_of(planned(folder, workload), replace(workload, **{name: values[name]}), folder)


def test_a_changed_initialisation_is_told(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(folder, load_workload(str(model)))
    model.write_text(MODEL.replace("# small", "# a comment changes nothing"))
    check_model_of(plan, load_workload(str(model)), folder)
    assert "note" not in capsys.readouterr().err
    model.write_text(MODEL.replace("STD = 8, 0.02", "STD = 8, 0.03"))
    check_model_of(plan, load_workload(str(model)), folder)
    assert "initial weights or batches may be others" in capsys.readouterr().err


def test_a_changed_batch_is_named(folder: Path, model: Path) -> None:
    plan = planned(folder, load_workload(str(model)))
    model.write_text(MODEL.replace("STD = 8, 0.02", "STD = 9, 0.02"))
    message = r"batch\['x'\] is float32 \[9, 16\] and was float32 \[8, 16\] \(its fingerprint"
    with pytest.raises(StalePlan, match=message):
        check_model_of(plan, load_workload(str(model)), folder)


def test_a_plan_that_does_not_say_is_not_compared(folder: Path, model: Path) -> None:
    workload = load_workload(str(model))
    other = replace(workload, learning_rate=1.0)
    assert changed_training(plan_folder.read_plan(folder), other) == []
