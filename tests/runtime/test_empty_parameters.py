"""Parameters without elements, as a layer has that fills up a width of nothing."""

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


@autopar.parallelize(
    batch=lambda: {"x": torch.randn(4, 8), "y": torch.arange(4)}, clip_norm=0.1
)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rows = nn.Parameter(torch.empty(0, 8))
        self.columns = nn.Parameter(torch.empty(8, 0))

    def forward(self, x, y):
        weight = torch.cat((self.first.weight, self.columns), 1)
        weight = torch.cat((weight, self.rows), 0)
        return F.cross_entropy(F.linear(x, weight, self.first.bias), y)
"""
FIXES = (
    {"dp_replicate": "2"},
    {"tp": "2"},
    *({"dp_shard": "2", "zero": zero} for zero in "123"),
    {"dp_shard": "2", "zero": "2", "microbatch": "1"},
)


@pytest.mark.gloo(2)
def test_they_are_held_and_move_nothing(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    folders = []
    for place, fix in enumerate(FIXES):
        planned = plan(str(model), str(cluster), fix)
        folder = tmp_path / str(place)
        plan_folder.write(folder, plan_files(planned, folder)[0])
        folders.append(folder)
    for verified in verify_many(folders):
        assert verified.collective_differences == ()
        assert verified.passed
