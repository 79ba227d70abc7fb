"""Verification holds what a program evaluates to against the model without dropout, its batch norms
by running statistics; a model that has more of its own for ``.eval()`` is named."""

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


class Model(nn.Module):
    def __init__(self, branches=False):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.plain = nn.BatchNorm1d(16), nn.BatchNorm1d(8, affine=False)
        self.drop, self.branches = nn.Dropout(0.3), branches
        self.recurrent = nn.GRU(8, 8, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x):
        x = self.plain(x)
        x = self.down(self.drop(self.norm(self.up(x)).relu()))
        x, _ = self.recurrent(F.dropout(x, 0.2, self.training).unsqueeze(1))
        if self.branches and self.training:
            x = x * 1.5
        return x.square().mean()


class Queries(nn.Module):
    # Learned queries, a view of a parameter, are made in the first stage and read in the last.

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        queries = self.queries.expand(len(x), -1, -1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return (queries * x.unsqueeze(1)).square().mean()


class Centred(nn.Module):
    # A centre that every forward puts another tensor in the place of, as that of DINO.

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))
        turn = torch.polar(torch.ones(4), torch.arange(4.0))
        self.turn = nn.Parameter(turn, requires_grad=False)

    def forward(self, x):
        x = torch.view_as_complex(self.layer(x).unflatten(1, (4, 2))) * self.turn
        x = torch.view_as_real(x).flatten(1)
        loss = (x - self.centre).square().mean()
        self.centre = self.centre * 0.9 + x.detach().mean(0) * 0.1
        return loss


class Momentum(nn.Module):
    # Stages of the teacher read what the student learns without giving it a gradient.

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(2)
        )
        self.teacher.requires_grad_(False)

    def forward(self, x):
        learnt = self.student(x)
        with torch.no_grad():
            for own, other in zip(self.student.parameters(), self.teacher.parameters()):
                other.data = other.data * 0.9 + own.data * 0.1
            taught = self.teacher(x.flip(1))
        return (learnt - taught).square().mean()


centred, momentum = (
    autopar.Workload(model=m, batch=lambda: {"x": torch.randn(8, 8)}, optimizer="adamw")
    for m in (Centred, Momentum)
)
asking = autopar.Workload(model=Queries, batch=lambda: {"x": torch.randn(8, 8)}, optimizer="adamw")


def workload(**given):
    return autopar.Workload(
        model=lambda: Model(**given), batch=lambda: {"x": torch.randn(8, 8)}, optimizer="adamw"
    )


plain, branching = workload(), workload(branches=True)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("evaluation")
    model = home / "model.py"
    model.write_text(MODEL)
    cluster = load_cluster("examples/clusters/cpu_4.yaml")
    made = {}
    fixes = {"asking": {"pp": "4"}, "momentum": {"pp": "2", "dp_shard": "2"}}
    for name in ("plain", "branching", "edited", "asking", "centred", "momentum"):
        target = "plain" if name == "edited" else name
        fix = fixes.get(name, {"tp": "2", "dp_replicate": "2"})
        result = plan(f"{model}:{target}", cluster, fix)
        made[name] = home / name
        plan_folder.write(made[name], plan_files(result, made[name])[0])
    program = made["edited"] / plan_folder.PROGRAM / "model.py"
    text, line = program.read_text(), "            training=self.training,\n"
    assert text.count(line) == 1
    program.write_text(text.replace(line, ""))
    return made


@pytest.mark.gloo
def test_evaluation_is_verified(folders: dict[str, Path]) -> None:
    names = [*folders]
    read = dict(zip(names, verify_many([*folders.values()]), strict=True))
    for name in ("plain", "branching", "asking", "centred", "momentum"):
        assert read[name].passed, read[name]
        assert read[name].exact.evaluation is not None
        asks = [s for s in read[name].unchecked if "self.training" in s]
        assert len(asks) == (name == "branching")
    # a batch norm without weights that never looks at whether it trains
    edited = read["edited"].exact
    assert not read["edited"].passed
    assert max(edited.loss, edited.gradient, edited.weight) < 1e-9
    assert edited.evaluation == float("inf")
    assert "running_mean" in edited.worst_evaluation
