"""Random numbers that a forward draws are drawn once: drawn again, they would be others."""

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

WORDS = 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Masked(nn.Module):
    \"\"\"Words masked by chance are read by the first stage and are the labels of the last.\"\"\"

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens):
        hidden = torch.rand(tokens.shape) < 0.15
        others = torch.randint(WORDS, tokens.shape)
        labels = tokens.masked_fill(~hidden, -100)
        x = self.embed(torch.where(hidden, others, tokens))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Deep(Masked):
    \"\"\"A loss in every layer, over labels that the batch gives.\"\"\"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Judged() for _ in range(4)])

    def forward(self, tokens):
        x, total = self.embed(tokens), 0.0
        for layer in self.layers:
            x, loss = layer(x, tokens)
            total = total + loss
        return total


class Judged(Layer):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, WORDS)

    def forward(self, x, labels):
        x = super().forward(x)
        labels = labels.masked_fill(labels % 3 == 0, -100)
        return x, F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch():
    return {"tokens": torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(0))}


masked = autopar.Workload(model=Masked, batch=batch)
deep = autopar.Workload(model=Deep, batch=batch)
"""


@pytest.mark.gloo(2)
def test_masks_that_two_places_read_are_drawn_once(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    folders = []
    for name in ("masked", "deep"):
        for pins in ({"dp_replicate": "2"}, {"tp": "2"}, {"pp": "2"}):
            if (name, pins) == ("deep", {"pp": "2"}):
                continue
            planned = plan(f"{model}:{name}", str(cluster), pins)
            folders.append(tmp_path / f"{name}-{'-'.join(pins)}")
            files, _ = plan_files(planned, folders[-1])
            plan_folder.write(folders[-1], files)
            draws = 1 if name == "masked" else 0
            for call in ("torch.rand(", "torch.randint("):
                assert files["program/model.py"].count(call) == draws, pins
    assert [verified.passed for verified in verify_many(folders)] == [True] * len(folders)
