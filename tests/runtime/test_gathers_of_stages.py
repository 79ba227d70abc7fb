"""What stages gather at ZeRO 3 where several microbatches are between forward and backward."""

from __future__ import annotations

import pytest

from autopar.cli.commands import plan_files
from autopar.files import plan_folder
from autopar.planner import plan
from autopar.runtime.jobs.launch import verify_many
from autopar.runtime.verify.verified import VerifyResult
from tests.plans import cluster_text
from tests.sampling import some

pytestmark = pytest.mark.gloo(4)
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    \"\"\"No parameter but those of layers.\"\"\"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class Taught(Layers):
    \"\"\"Frozen layers run behind those that learn.\"\"\"

    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList(Layer() for _ in range(2)).requires_grad_(False)
        self.head = nn.Linear(16, 16)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            for layer in self.teacher:
                y = layer(y)
        return F.mse_loss(self.head(x), y)


batch = lambda: {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}
layers = autopar.Workload(model=Layers, batch=batch)
taught = autopar.Workload(model=Taught, batch=batch)
"""
FIX = {"pp": "2", "dp_shard": "2", "zero": "3", "microbatch": "1", "recompute": "none"}
CASES = some([(n, s) for n in ("layers", "taught") for s in ("1f1b", "gpipe", "zb-h1")], 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], VerifyResult]:
    where = tmp_path_factory.mktemp("stages")
    (where / "model.py").write_text(MODEL)
    (where / "cluster.yaml").write_text(cluster_text(4))
    folders = []
    for name, schedule in CASES:
        folder = where / f"{name}_{schedule}"
        fix = {**FIX, "schedule": schedule}
        made = plan(f"{where / 'model.py'}:{name}", str(where / "cluster.yaml"), fix)
        plan_folder.write(folder, plan_files(made, folder)[0])
        folders.append(folder)
    return dict(zip(CASES, verify_many(folders), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_it_is_what_was_priced(
    results: dict[tuple[str, str], VerifyResult], case: tuple[str, str]
) -> None:
    """FSDP2 by itself gathers for backward what ran before, be it of another microbatch."""
    assert results[case].collective_differences == ()
    assert results[case].passed
