"""A compiled run computes what the eager one does, to rounding."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.nouns.style import Style
from autopar.planner import plan
from autopar.planner.options import Options
from autopar.runtime.jobs.launch import run
from tests.plans import cluster_text

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(8, 16, generator=generator),
        "y": torch.randint(0, 4, (8,), generator=generator),
    }

@autopar.parallelize(batch=batch, clip_norm=1.0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)
"""


COMPILER = next(
    filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), ""
)


@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.gloo(2)
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("style", ["layers", "compiled"])
def test_compiled_runs_have_the_losses_of_an_eager_one(
    style: Style, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    # Without, inductor compiles programs to try what the CPU says of itself.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(cluster_text(2))
    folder, given = tmp_path / "plan", (str(tmp_path / "model.py"), str(tmp_path / "cluster.yaml"))
    # The loss head, which lies around the layers, is one in chunks.
    fix = {"tp": "2", **({"loss_chunks": "2"} if style == "layers" else {})}
    planned = plan(*given, fix, Options(style=style))
    plan_folder.write(folder, plan_files(planned, folder)[0])
    eager, compiled = run(folder, 3, compile=False), run(folder, 3)
    assert (eager.style, compiled.style) == ("eager", style)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-6)
    assert compiled.losses[2] != compiled.losses[0]
