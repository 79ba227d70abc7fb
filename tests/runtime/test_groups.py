"""Groups of processes: each rank makes those that it needs, in its own order."""

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
import torch.nn.functional as F
from torch import nn
import autopar


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x, y)


workload = autopar.Workload(
    model=Model,
    batch=lambda: {"x": torch.randn(16, 8), "y": torch.tensor([*range(8), -100, -100, *range(6)])},
    optimizer="adamw",
    clip_norm=1.0,
)
"""


@pytest.mark.gloo(8)
def test_stages_ask_for_other_groups_in_between(tmp_path: Path) -> None:
    """The last stage alone counts labels, over both data axes together; all stages clip by a norm
    over the pipeline and one of them. Ranks waited for each other for ever."""
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(8))
    fix = {"pp": "2", "dp_replicate": "2", "dp_shard": "2", "zero": "1"}
    made = plan(str(model), str(cluster), fix)
    plan_folder.write(tmp_path / "plan", plan_files(made, tmp_path / "plan")[0])
    (result,) = verify_many([tmp_path / "plan"])
    assert result.passed, result
