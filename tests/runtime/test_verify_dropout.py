"""Verification of blocks that end in dropout and run again: as far as in training."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.files.cluster_file import load_cluster
from autopar.planner import plan
from autopar.runtime.jobs.launch import verify_many

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(self.up(x).relu()))


@autopar.parallelize(batch=lambda: {"x": torch.randn(4, 512)})
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
"""


@pytest.mark.gloo(2)
def test_a_sum_before_a_dropout_runs_again(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(
        "name: fast\n"
        "groups: [{device: cpu-core, count: 2}]\n"
        "levels: [{name: link, span: 2, bandwidth: 1000 GB/s, latency: 0.1 us, library: gloo}]\n"
    )
    folders = []
    for recompute in ("none", "full"):
        fix = {"tp": "2", "recompute": recompute}
        made = plan(f"{tmp_path / 'model.py'}:Model", load_cluster(tmp_path / "cluster.yaml"), fix)
        folders.append(tmp_path / recompute)
        plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
        text = (folders[-1] / "program" / "model.py").read_text()
        assert "all_reduce(" in text.split("F.dropout(")[0]
    for verified in verify_many(folders):
        assert verified.collective_differences == ()
        assert verified.passed
