"""What moves again where a block runs again is what is priced: where it ends in a dropout, which
verification holds fixed, and where a sum is read behind what is kept last."""

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


class TwoSums(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.left, self.down = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)
        self.right, self.back = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)
        self.gate = nn.Linear(512, 1, bias=False)

    def forward(self, x):
        y = self.norm(x)
        left = self.down(self.left(y).relu())
        return x + (left + self.gate(y).sigmoid() * self.back(self.right(y).relu()))


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def workload(layer):
    return autopar.Workload(
        model=lambda: Model(layer), batch=lambda: {"x": torch.randn(4, 512)}, optimizer="adamw"
    )


dropped, two_sums = workload(Layer), workload(TwoSums)
"""


@pytest.mark.gloo(2)
def test_what_moves_again_is_what_is_priced(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(
        "name: fast\n"
        "groups: [{device: cpu-core, count: 2}]\n"
        "levels: [{name: link, span: 2, bandwidth: 1000 GB/s, latency: 0.1 us, library: gloo}]\n"
    )
    cluster, folders = load_cluster(tmp_path / "cluster.yaml"), []
    for name in ("dropped", "two_sums"):
        made = plan(f"{tmp_path / 'model.py'}:{name}", cluster, {"tp": "2", "recompute": "full"})
        folders.append(tmp_path / name)
        plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
    dropped, two_sums = ((f / "program" / "model.py").read_text() for f in folders)
    assert "all_reduce(" in dropped.split("F.dropout(")[0]
    lines = two_sums.splitlines()
    kept = next(i for i, line in enumerate(lines) if ".sigmoid() * back" in line)
    assert "left = all_reduce(left" in lines[kept + 1]
    for verified in verify_many(folders):
        assert verified.collective_differences == ()
        assert verified.passed
