"""``train.py`` and the trainer are one way to train, under every schedule and state sharding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from autopar.files import plan_folder
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.runtime.shared.program_module import read_train
from benchmarks import train_files
from benchmarks.planned import planned_in
from tests import warm_ranks
from tests.plans import cluster_text
from tests.sampling import some

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=generator), "y": torch.arange(8)}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale):
        return x + F.dropout(self.down(torch.tanh(self.up(x * scale))), 0.1)


class Model(nn.Module):
    def __init__(self, layers=4, times=1.0):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("scale", 1.0 + torch.rand(8), persistent=False)
        self.times = times

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x, self.scale)
        return F.cross_entropy(x, y) * self.times


plain = autopar.Workload(model=Model, batch=batch, clip_norm=0.5, learning_rate=1e-2)
deep = autopar.Workload(
    model=lambda: Model(8), batch=batch, clip_norm=0.5, learning_rate=1e-2
)
half = autopar.Workload(  # whose first steps overflow
    model=lambda: Model(times=300.0), batch=batch, precision="float16", learning_rate=1e-2
)
"""
JAX_MODEL = """
import jax
import jax.numpy as jnp
import numpy as np
import autopar


def init(key):
    up, down = jax.random.split(key)
    up = jax.random.normal(up, (3, 8, 16)) / 3
    return {"up": up, "down": jax.random.normal(down, (3, 16, 8))}


def batch(step=0):
    return {"x": np.random.default_rng(step).normal(size=(16, 8)).astype("float32")}


def loss(params, batch, times=1.0):
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    return jnp.mean(jnp.square(jax.lax.scan(layer, batch["x"], params)[0])) * times


plain = autopar.Workload(loss=loss, init=init, batch=batch, clip_norm=0.5)
half = autopar.Workload(  # 2 / 128 by 300 by 65536, the first scale, is beyond float16
    loss=lambda params, batch: loss(params, batch, 300.0),
    init=init, batch=batch, precision="float16",
)
"""
STATE: dict[str, dict[str, str]] = {
    "replicate": {"dp_replicate": "4", "microbatch": "1"},
    **{f"ZeRO {z}": {"dp_shard": "4", "zero": str(z), "microbatch": "1"} for z in (1, 2, 3)},
    "both, tp": {"dp_shard": "2", "tp": "2", "zero": "3", "recompute": "full"},
    "pipeline x tp": {"pp": "2", "tp": "2", "interleave": "2", "schedule": "interleaved-1f1b"},
    "pipeline x ZeRO": {"pp": "2", "dp_shard": "2", "zero": "1", "schedule": "zb-h1"},
}
ONE_EACH = {name for name, kind in SCHEDULES.items() if kind.stages == 1 and not kind.interleaves}
"""Schedules of one stage a rank; the others have two, and as many layers to put there."""
PIPELINES = {
    name: {"pp": "4", "schedule": name, "microbatch": "1"} for name in SCHEDULES if name != "none"
}
LAYOUTS: Mapping[str, Mapping[str, dict[str, str]]] = {
    "plain": STATE | {name: fix for name, fix in PIPELINES.items() if name in ONE_EACH},
    "deep": {name: fix for name, fix in PIPELINES.items() if name not in ONE_EACH},
    "half": {name: STATE[name] for name in ("replicate", "ZeRO 2", "pipeline x ZeRO")},
}


def planned(
    tmp_path: Path, text: str, workload: str, layouts: Mapping[str, Mapping[str, str]]
) -> dict[str, Path]:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(text)
    cluster.write_text(cluster_text(4))
    folders, refused = planned_in(f"{model}:{workload}", tmp_path / workload, layouts, str(cluster))
    assert not refused
    return folders


def compare(folders: Mapping[str, Path], where: Path) -> None:
    """Nothing differs under any of these layouts."""
    differing = train_files.differences(list(folders.values()), 4, where)
    by_layout = {name: differing[str(folder)] for name, folder in folders.items()}
    assert by_layout == dict.fromkeys(folders, "")


@pytest.mark.gloo(4)
def test_train_py_trains_bit_for_bit_what_the_trainer_does(tmp_path: Path) -> None:
    """All in one start of ranks."""
    folders = {
        f"{workload}, {name}": folder
        for workload, layouts in LAYOUTS.items()
        for name, folder in planned(tmp_path, MODEL, workload, layouts).items()
    }
    assert len(folders) == len(STATE) + len(PIPELINES) + len(LAYOUTS["half"])
    stages = {
        name: len(plan_folder.read_plan(folders[f"deep, {name}"]).stages)
        for name in LAYOUTS["deep"]
    }
    assert stages == dict.fromkeys(LAYOUTS["deep"], 8)
    scaled = folders["half, replicate"]
    compare({name: folders[name] for name in some(folders, 9)}, tmp_path / "job")
    text = (scaled / plan_folder.PROGRAM / plan_folder.TRAIN).read_text()
    assert "if state.loss_scale.skips(state.pieces, state.ranks):" in text
    assert hasattr(read_train(scaled), "main")


def test_train_py_of_jax_trains_bit_for_bit_what_the_trainer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_files, "python", warm_ranks.python_of_jax)
    layouts = {name: fix for name, fix in STATE.items() if "pp" not in fix}
    folders = {
        f"{workload}, {name}": folder
        for workload in ("plain", "half")
        for name, folder in planned(tmp_path, JAX_MODEL, workload, layouts).items()
    }
    assert len(folders) == 2 * len(layouts)
    compare({name: folders[name] for name in some(folders, 5)}, tmp_path / "job")
