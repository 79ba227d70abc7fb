"""Layers that are called several times in one forward, as in ALBERT and in loops of refinement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.lowering.stages import stage_parts
from autopar.planner import plan
from autopar.runtime.jobs.launch import verify_many
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
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = Layer()

    def forward(self, x, y):
        x = self.first(x)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return F.cross_entropy(self.last(x), y)
"""


@pytest.mark.gloo(2)
def test_their_parameters_are_gathered_once(tmp_path: Path) -> None:
    """With those outside of the layers, whatever the state sharding: as priced, and right."""
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(2))
    folders = []
    for zero in "123":
        for microbatch in "12":
            fix = {"dp_shard": "2", "zero": zero, "microbatch": microbatch}
            folder = tmp_path / f"{zero}_{microbatch}"
            planned = plan(str(model), str(cluster), fix)
            (block,) = planned.graph.blocks.values()
            assert len(block.instances) == 6
            files, _ = plan_files(planned, folder)
            plan_folder.write(folder, files)
            folders.append(folder)
    for verified in verify_many(folders):
        assert verified.collective_differences == ()
        assert verified.passed


@pytest.mark.gloo(4)
def test_of_a_pipeline_every_stage_that_calls_them_holds_them(tmp_path: Path) -> None:
    """As ties: found without a pin, and right in every stage."""
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(4))
    fixes: list[dict[str, str]] = [
        {},
        {"pp": "4"},
        {"pp": "2", "dp_shard": "2", "zero": "3"},
        {"pp": "2", "tp": "2", "schedule": "zb-v", "microbatch": "1"},
    ]
    folders = []
    for i, fix in enumerate(fixes):
        made = plan(str(model), str(cluster), fix)
        assert not made.obstacles
        folders.append(tmp_path / str(i))
        plan_folder.write(folders[-1], plan_files(made, folders[-1])[0])
    for result in verify_many(folders):
        assert result.passed, result


@pytest.mark.gloo(4)
def test_a_stage_that_calls_them_once_gathers_them_as_all_do(tmp_path: Path) -> None:
    """With the rest of its parameters: the program has one list of units for all stages."""
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL.replace("range(3)", "range(2)"))
    cluster.write_text(cluster_text(4))
    fix = {"pp": "2", "dp_shard": "2", "zero": "3", "recompute": "none", "microbatch": "1"}
    made = plan(str(model), str(cluster), fix)
    (whole,) = made.graph.blocks.values()
    assert whole.units == ()
    first, second = made.plan.stages
    for cut in [op.outputs[0] for op in made.graph.ops if op.kind == "block"][1:]:
        stages = (first, replace(second, first=cut))
        for part in stage_parts(made.lowered, stages):
            assert all(block.units == () for block in part.lowered.graph.blocks.values())
    plan_folder.write(tmp_path / "plan", plan_files(made, tmp_path / "plan")[0])
    (verified,) = verify_many([tmp_path / "plan"])
    assert verified.collective_differences == ()
    assert verified.passed
