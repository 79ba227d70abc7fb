"""Parameters of several dtypes in one unit: each is reduced in its own, under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.nouns.layout import LayoutError
from autopar.planner import plan
from autopar.runtime.jobs.launch import verify_many
from tests.plans import cluster_text
from tests.sampling import some

MODEL = """
import torch
from torch import nn
import autopar


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(16))
        self.shift = nn.Parameter(torch.full((16,), 0.5, dtype=torch.float16))
        self.frozen = nn.Parameter(torch.ones(16, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        y = self.up(x.bfloat16()).float() * self.scale + self.shift.float()
        return x + y.tanh() * self.frozen.float()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        x = self.embed(tokens).float()
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).tanh().mean()


workload = autopar.Workload(
    model=Model, batch=lambda: {"tokens": torch.randint(0, 32, (8, 4))}
)
"""
LAYOUTS = (
    {"dp_shard": "4", "zero": "1"},
    {"dp_shard": "4", "zero": "2", "microbatch": "1"},
    {"dp_shard": "4", "zero": "3"},
    {"dp_replicate": "2", "dp_shard": "2", "zero": "3"},
    {"dp_shard": "2", "tp": "2", "zero": "2"},
    {"pp": "2", "dp_shard": "2", "zero": "1", "microbatch": "1"},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("dtypes")
    model, cluster = home / "model.py", home / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(4))
    return model, cluster


@pytest.mark.gloo(4)
def test_each_dtype_of_a_unit_is_reduced_in_its_own(files: tuple[Path, Path]) -> None:
    model, cluster = files
    folders = []
    layouts = some(LAYOUTS, 3)
    for number, pins in enumerate(layouts):
        planned = plan(f"{model}:workload", str(cluster), pins)
        folders.append(model.parent / f"plan_{number}")
        made, _ = plan_files(planned, folders[-1])
        plan_folder.write(folders[-1], made)
    verified = verify_many(folders)
    assert [one.passed for one in verified] == [True] * len(layouts)


def test_computing_in_another_dtype_needs_parameters_alike(files: tuple[Path, Path]) -> None:
    model, cluster = files
    lower = model.with_name("lower.py")
    lower.write_text(MODEL.replace("model=Model,", 'model=Model, precision="bfloat16",'))
    with pytest.raises(LayoutError, match="one dtype at once where it computes in another"):
        plan(f"{lower}:workload", str(cluster), {"dp_shard": "4", "zero": "3"})
