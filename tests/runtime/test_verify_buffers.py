"""Buffers side by side: tables of every dtype, and what a forward updates."""

from __future__ import annotations

import re
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


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("mask", torch.arange(16) % 3 > 0)
        self.register_buffer("places", torch.arange(16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.linear(x)[..., self.places] * self.mask
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.steps += 1
        z = torch.view_as_complex(x.view(*x.shape[:-1], 8, 2)) * self.turns
        return (torch.view_as_real(z).flatten(-2) - self.mean).square().mean()


workload = autopar.Workload(model=Tables, batch=lambda: {"x": torch.randn(4, 16)})
"""


@pytest.mark.gloo(2)
def test_right_ones_pass_and_a_lost_update_does_not(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    planned = plan(f"{model}:workload", str(cluster), {"dp_replicate": "2"})
    folders = [tmp_path / name for name in ("right", "steps", "mean")]
    for folder in folders:
        files, _ = plan_files(planned, folder)
        text = files["program/model.py"]
        if folder.name != "right":
            text, lines = re.subn(rf"\n +carry\(self, {folder.name}\w*=.*", "", text)
            assert lines == 1
        plan_folder.write(folder, {**files, "program/model.py": text})
    assert [verified.passed for verified in verify_many(folders)] == [True, False, False]
