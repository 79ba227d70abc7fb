"""A JAX program's folder has all that it needs where autopar is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli.carried import STUB, carried_arrays, carried_sources
from autopar.frontends.dispatch import capture
from autopar.frontends.loading import load_workload
from autopar.nouns.workload import Workload
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


def test_a_package_of_another_environment_is_not_carried(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "other" / "site-packages" / "borrowed.py"
    package.parent.mkdir(parents=True)
    package.write_text("FACTOR = 1.0\n")
    monkeypatch.syspath_prepend(str(package.parent))
    model.write_text(f"import borrowed\n{model.read_text()}")
    load_workload(f"{model}:trained")
    assert "workload/borrowed.py" not in carried_sources(f"{model}:trained")


def test_the_stub_says_what_a_workload_says_that_is_given_no_more(tmp_path: Path) -> None:
    """And the class itself is no workload, where a file imports it by name."""
    (tmp_path / "autopar.py").write_text(STUB)
    (tmp_path / "model.py").write_text(
        "from autopar import Workload\nmade = Workload(loss=len, init=len, batch=len, seed=3)\n"
    )
    code = (
        "import pathlib, sys; from autopar.runtime.jax.parallel import read_workload; "
        "[sys.modules.pop(name) for name in list(sys.modules) if name == 'autopar']; "
        "made = read_workload(pathlib.Path(sys.argv[1]), 'model.py'); "
        "print(made.seed, made.optimizer, made.betas, made.clip_norm)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    own = Workload(loss=len, init=len, batch=dict, seed=3)
    assert printed == f"{own.seed} {own.optimizer} {own.betas} {own.clip_norm}\n"


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
