"""Parameters that a forward keeps between limits: programs bring every rank's pieces there."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.planner import plan
from autopar.runtime.jobs.launch import verify_many
from tests.plans import cluster_text

MODEL = """
import torch
from torch import nn
import autopar


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        self.linear.weight.data.clamp_(-0.1, 0.15)
        return x + self.linear(x).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x):
        with torch.no_grad():
            self.scale.clamp_(min=0)
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().mean()


workload = autopar.Workload(model=Model, batch=lambda: {"x": torch.randn(4, 3, 16)})
"""
LAYOUTS = ({"dp_replicate": "2"}, {"dp_shard": "2", "zero": "3"}, {"tp": "2"}, {"pp": "2"})
LIMIT = "state.limit()"


@pytest.mark.gloo(2)
def test_pieces_are_within_limits_and_a_lost_limit_is_seen(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    folders = []
    for number, layout in enumerate(LAYOUTS):
        planned = plan(f"{model}:workload", str(cluster), layout)
        folders.append(tmp_path / f"plan_{number}")
        plan_folder.write(folders[-1], plan_files(planned, folders[-1])[0])
    lost = tmp_path / "lost"
    files, _ = plan_files(planned, lost)
    text = files["program/train.py"]
    assert text.count(LIMIT) == 1
    files = {**files, "program/train.py": text.replace(LIMIT, "pass")}
    plan_folder.write(lost, files)
    verified = verify_many([*folders, lost])
    assert [v.passed for v in verified] == [*(True for _ in LAYOUTS), False]
    assert max(max(v.exact.gradient, v.exact.weight) for v in verified[:-1]) < 1e-9
