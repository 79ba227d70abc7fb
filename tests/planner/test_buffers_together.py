"""A layer that updates buffers of its own and is called several times stands on one stage."""

from __future__ import annotations

from pathlib import Path

from autopar.planner import plan
from tests.plans import cluster_text

MODEL = """
import torch
from torch import nn
import autopar


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(self.linear(x)).relu()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Views(nn.Module):
    \"\"\"Two views go through one encoder, one after the other.\"\"\"

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*[Normed() for _ in range(3)])
        self.head = nn.ModuleList([Plain() for _ in range(4)])

    def forward(self, x, y):
        z = self.encoder(x) * self.encoder(y)
        for layer in self.head:
            z = layer(z)
        return z.square().mean()


workload = autopar.Workload(
    model=Views, batch=lambda: {"x": torch.randn(4, 16), "y": torch.randn(4, 16)}
)
"""


def test_both_calls_of_every_layer_are_on_the_first_stage(tmp_path: Path) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    planned = plan(f"{model}:workload", str(cluster), {"pp": "2"})
    names = [op.op.name for op in planned.lowered.ops]
    calls = [op.op for op in planned.lowered.ops if op.op.kind == "block"]
    encoders = [names.index(op.name) for op in calls if "encoder" in op.attrs["instance"]]
    assert len(encoders) == 6
    assert names.index(planned.plan.stages[1].first) > max(encoders)


AVERAGED = """
import torch
from torch import nn
import autopar


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.mean = torch.zeros(16)

    def forward(self, x):
        x = self.linear(x)
        mean = x.mean(0)
        self.mean = (0.9 * self.mean + 0.1 * mean).detach()
        return (x - mean + self.mean).tanh()


workload = autopar.Workload(
    model=lambda: Model(), batch=lambda: {"x": torch.randn(4, 16)}
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Averaged() for _ in range(4)])

    def forward(self, x):
        return self.layers(x).square().mean()
"""


def test_averages_in_attributes_are_carried_where_they_are_made(tmp_path: Path) -> None:
    """What is put in their place at the end of the forward tied all stages to the last."""
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(AVERAGED)
    cluster.write_text(cluster_text(4))
    assert len(plan(f"{model}:workload", str(cluster), {"pp": "4"}).plan.stages) == 4
