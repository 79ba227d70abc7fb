"""Gradients that are zero in theory: rounding that AdamW would make steps of is no difference."""

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
from benchmarks.zoo_models import ZOO


class Attention(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.shift, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.key = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        x = self.norm(self.shift(x).transpose(1, 2)).transpose(1, 2)
        x, _ = self.attention(x, x, x, need_weights=False)
        scores = (x @ (x + self.key).transpose(1, 2)).softmax(-1)
        return 1e3 * (scores @ x).square().mean()


workload = autopar.Workload(
    model=Attention, batch=lambda: {"x": torch.randn(4, 6, 16)}
)
gpt2, t5 = ZOO["gpt2"](), ZOO["t5"]()
"""


@pytest.mark.gloo(2)
def test_verify_says_right_of_them(tmp_path: Path) -> None:
    """A key's bias, alone and inside of a fused one, and biases in front of a normalisation."""
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    folders = []
    for name, degree in (
        ("workload", "dp_replicate"),
        ("workload", "tp"),
        ("gpt2", "tp"),
        ("t5", "dp_shard"),
    ):
        folders.append(tmp_path / f"{name}_{degree}")
        planned = plan(f"{model}:{name}", str(cluster), {degree: "2"})
        plan_folder.write(folders[-1], plan_files(planned, folders[-1])[0])
    for verified in verify_many(folders):
        assert verified.passed, verified
        assert verified.own_within_rounding
