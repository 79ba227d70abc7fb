"""``train.py`` of a program: what a person starts by torchrun is what `autopar run` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.planner import plan
from autopar.runtime.jobs.launch import run, verify
from tests import warm
from tests.plans import cluster_text
from tests.warm_ranks import loose

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, 32, (8, 1), generator=generator)
    return {"tokens": (first + torch.arange(16)) % 32}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + F.dropout(self.down(self.up(self.norm(x)).relu()), 0.1)


@autopar.parallelize(batch=batch, clip_norm=0.5, learning_rate=1e-2)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
"""
FIXES = {
    "every axis of a mesh": {"tp": "2", "dp_shard": "2", "zero": "3"},
    "accumulation": {"dp_replicate": "2", "microbatch": "2"},
    "a pipeline": {"pp": "2", "schedule": "1f1b", "microbatch": "2"},
}
STEPS = 3
ROOT = Path(__file__).parents[2]


def folder_of(where: Path, fix: dict[str, str]) -> Path:
    model, cluster = where / "model.py", where / "cluster.yaml"
    model.write_text(MODEL)
    ranks = 4 if "tp" in fix else 2
    cluster.write_text(cluster_text(ranks))
    folder = where / "plan"
    plan_folder.write(folder, plan_files(plan(str(model), str(cluster), fix), folder)[0])
    return folder


@pytest.mark.gloo(4)
@pytest.mark.parametrize("name", FIXES)
@pytest.mark.some(2)
def test_train_py_prints_the_losses_of_a_run(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, FIXES[name])
    ranks = plan_folder.read_plan(folder).device_count
    losses = run(folder, STEPS, quiet=True).losses
    file = folder / plan_folder.PROGRAM / plan_folder.TRAIN
    words = [str(file), "--steps", str(STEPS)]
    if name == "accumulation":
        started = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        code, out, err = started.returncode, started.stdout, started.stderr
    else:  # with its environment, for a tenth of its start
        code, out, err = warm.done(loose, (ranks, words), ROOT)
    assert code == 0, err
    assert out.splitlines() == [f"step {i}  loss {loss:.6f}" for i, loss in enumerate(losses)]
    assert losses[0] > losses[-1]


@pytest.mark.gloo(2)
def test_what_is_edited_there_is_run_and_verified(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, FIXES["accumulation"])
    file = folder / plan_folder.PROGRAM / plan_folder.TRAIN
    text = file.read_text()
    wrong = text.replace(
        "clip(state.pieces, state.ranks, 0.5)", "clip(state.pieces, state.ranks, 5.0)"
    )
    assert wrong != text
    file.write_text(wrong)
    result = verify(folder)
    assert not result.passed
    assert result.exact.weight > 1e-3
    assert f"{file} is not the program of its plan.json" in result.first_difference
    file.write_text(text.replace("def update(", "def step("))
    with pytest.raises(UserError, match=r"train\.py has no function update"):
        run(folder, 1)
