"""A JAX program's folder has all that it needs where autopar is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.carried import carried_arrays, carried_sources
from autopar.frontends.dispatch import capture
from autopar.frontends.loading import load_workload
from benchmarks import train_files
from benchmarks.planned import planned_in
from tests import warm_ranks
from tests.plans import cluster_text

FILES = {
    "train.py": """
import jax
import jax.numpy as jnp
import numpy as np

import autopar
import parallel  # the user's own
from layers.dense import dense

TABLE = jnp.linspace(0.5, 1.5, 4096).astype(jnp.bfloat16).reshape(512, 8)


def init(key):
    up, down = jax.random.split(key)
    return {
        "layers": {
            "up": jax.random.normal(up, (3, 8, 16)) / 3,
            "down": jax.random.normal(down, (3, 16, 8)) / 3,
        },
    }


def batch(step=0):
    x = np.random.default_rng(step).normal(size=(16, 8)).astype("float32")
    ids = np.arange(16, dtype="int32") * 31 + step
    return {"x": x, "ids": ids, "key": jax.random.fold_in(jax.random.key(0), step)}


def loss(params, batch):
    kept = jax.random.bernoulli(batch["key"], 0.9, batch["x"].shape)
    x = jnp.where(kept, batch["x"], 0.0) * parallel.FACTOR
    x = x + TABLE[batch["ids"]].astype(jnp.float32)
    x, _ = jax.lax.scan(dense, x, params["layers"])
    return jnp.mean(jnp.square(x)), {"rows": x.sum(-1)}


trained = autopar.Workload(loss=loss, init=init, batch=batch, has_aux=True, clip_norm=0.5)
other = autopar.Workload(loss=loss, init=init, batch=batch, has_aux=True, optimizer="sgd")
""",
    "parallel.py": "FACTOR = 1.25\n",
    "layers/__init__.py": "",
    "layers/dense.py": """
import jax.numpy as jnp
from . import shapes


def dense(x, p):
    assert x.shape[-1] == shapes.WIDTH
    return x + jnp.tanh(x @ p["up"]) @ p["down"], None
""",
    "layers/shapes.py": "WIDTH = 8\n",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "own" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "own" / "train.py"


def test_the_file_and_what_it_imports_of_the_users(model: Path) -> None:
    load_workload(f"{model}:trained")
    sources = carried_sources(f"{model}:trained")
    assert sources.pop("workload/autopar.py").startswith('"""In the place of autopar')
    assert sources == {f"workload/{name}": text for name, text in FILES.items()}


def test_a_script_is_not_carried(model: Path) -> None:
    """Importing it would train; its plan is of a function."""
    load_workload(f"{model}:trained")
    assert carried_sources(f"{model}:loss") == {}


def test_numbers_are_the_same_each_time(model: Path) -> None:
    captured = capture(load_workload(f"{model}:trained"))
    arrays = carried_arrays(captured)
    assert set(arrays) == {"constants.npz", "draws.bin"}
    assert arrays["constants.npz"] == carried_arrays(captured)["constants.npz"]


def test_it_trains_alone_as_beside_autopar(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files called as the program's own, relative imports, bfloat16 constants, random keys, what
    is returned beside the loss: bit for bit the losses and the state of the trainer."""
    monkeypatch.setattr(train_files, "python", warm_ranks.python_of_jax)
    (tmp_path / "cluster.yaml").write_text(cluster_text(4))
    layouts = {
        "whole": {"dp_shard": "2", "tp": "2", "zero": "3", "microbatch": "4"},
        "pieces": {"dp_shard": "4", "zero": "2", "microbatch": "2"},
    }
    folders, refused = planned_in(
        f"{model}:trained", tmp_path / "plans", layouts, str(tmp_path / "cluster.yaml")
    )
    assert refused == {}
    differing = train_files.differences(list(folders.values()), 4, tmp_path / "job")
    assert differing == dict.fromkeys(map(str, folders.values()), "")
