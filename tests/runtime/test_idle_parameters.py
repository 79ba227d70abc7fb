"""What a model holds and its forward never reads: a tower for pictures of one trained on words."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.planner import plan
from autopar.runtime.jobs.launch import run, verify_many
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


@autopar.parallelize(
    batch=lambda: {"x": torch.randn(4, 8), "y": torch.arange(4)}, clip_norm=0.1
)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("mean", torch.rand(5))
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x, y)
"""
LAYOUTS = (
    {"pp": "4", "schedule": "1f1b", "microbatch": "1"},
    {"pp": "2", "dp_shard": "2", "zero": "1", "interleave": "2", "schedule": "interleaved-1f1b"},
    {"dp_shard": "4", "zero": "3"},
)


@pytest.mark.gloo(4)
def test_it_is_held_and_goes_from_plan_to_plan(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(4))
    folders = []
    for number, fix in enumerate(LAYOUTS):
        folder = tmp_path / f"plan_{number}"
        plan_folder.write(folder, plan_files(plan(str(model), str(cluster), fix), folder)[0])
        assert "tower" in (folder / plan_folder.PROGRAM / plan_folder.MODEL).read_text()
        folders.append(folder)
    for result in verify_many(folders):
        assert result.passed
        assert result.exact.largest < 1e-12
    whole = run(folders[2], 3, quiet=True).losses
    run(folders[0], 2, save=tmp_path / "saved", quiet=True)
    rest = run(folders[2], 1, resume=tmp_path / "saved", quiet=True)
    assert rest.losses[-1] == pytest.approx(whole[-1], rel=1e-5)
