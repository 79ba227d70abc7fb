"""``train.py`` and the trainer are one way to train, under every schedule and state sharding."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.files import plan_folder
from autopar.pipeline.schedules.table import SCHEDULES
from autopar.runtime.shared.program_module import read_train
from benchmarks.planned import planned_in
from benchmarks.train_files import differences
from tests.plans import cluster_text

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 8, generator=generator), "y": torch.arange(16) % 8}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale):
        return x + F.dropout(self.down(torch.tanh(self.up(x * scale))), 0.1)


class Model(nn.Module):
    def __init__(self, times=1.0):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.register_buffer("scale", 1.0 + torch.rand(8), persistent=False)
        self.times = times

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x, self.scale)
        return F.cross_entropy(x, y) * self.times


plain = autopar.Workload(model=Model, batch=batch, clip_norm=0.5, learning_rate=1e-2)
half = autopar.Workload(  # whose first steps overflow
    model=lambda: Model(300.0), batch=batch, precision="float16", learning_rate=1e-2
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
    "replicate": {"dp_replicate": "4", "microbatch": "2"},
    **{f"ZeRO {z}": {"dp_shard": "4", "zero": str(z), "microbatch": "2"} for z in (1, 2, 3)},
    "both, tp": {"dp_shard": "2", "tp": "2", "zero": "3", "recompute": "full"},
    "pipeline x tp": {"pp": "2", "tp": "2", "interleave": "2", "schedule": "interleaved-1f1b"},
    "pipeline x ZeRO": {"pp": "2", "dp_shard": "2", "zero": "1", "schedule": "zb-h1"},
}
EVERY = STATE | {
    name: {"pp": "4", "schedule": name, "microbatch": "1"} for name in SCHEDULES if name != "none"
}
HALF = {name: STATE[name] for name in ("replicate", "ZeRO 2", "pipeline x ZeRO")}


@pytest.mark.gloo(4)
@pytest.mark.parametrize(("workload", "layouts"), [("plain", EVERY), ("half", HALF)])
def test_train_py_trains_bit_for_bit_what_the_trainer_does(
    tmp_path: Path, workload: str, layouts: dict[str, dict[str, str]]
) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(MODEL)
    cluster.write_text(cluster_text(4))
    folders, refused = planned_in(f"{model}:{workload}", tmp_path, layouts, str(cluster))
    assert not refused
    found = differences(list(folders.values()), 4, tmp_path / "job")
    assert {name: found[str(folder)] for name, folder in folders.items()} == dict.fromkeys(
        folders, ""
    )
    if workload == "half":
        text = (folders["replicate"] / plan_folder.PROGRAM / plan_folder.TRAIN).read_text()
        assert "if state.loss_scale.skips(state.pieces, state.ranks):" in text
        assert hasattr(read_train(folders["replicate"]), "main")


@pytest.mark.parametrize("workload", ["plain", "half"])
def test_train_py_of_jax_trains_bit_for_bit_what_the_trainer_does(
    tmp_path: Path, workload: str
) -> None:
    model, cluster = tmp_path / "model.py", tmp_path / "cluster.yaml"
    model.write_text(JAX_MODEL)
    cluster.write_text(cluster_text(4))
    layouts = {name: fix for name, fix in STATE.items() if "pp" not in fix}
    folders, refused = planned_in(f"{model}:{workload}", tmp_path, layouts, str(cluster))
    assert not refused
    found = differences(list(folders.values()), 4, tmp_path / "job")
    assert {name: found[str(folder)] for name, folder in folders.items()} == dict.fromkeys(
        folders, ""
    )
