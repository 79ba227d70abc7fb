"""Accelerate and Transformers train two steps under exported plans, with the losses of our job.

One job of ours is enough: plans of one model differ in rounding alone (`tests/examples`).
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cli.commands import plan_files, search
from autopar.cli.exports import Asked, export, of_folder
from autopar.emit.exports import accelerate
from autopar.emit.exports.setup import Machines
from autopar.files import plan_folder
from autopar.frontends.loading import load_workload
from autopar.runtime.jobs.launch import run
from tests import warm
from tests.warm_ranks import loose

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
MODEL = str(Path(__file__).with_name("two_layers.py"))
SCRIPT = str(Path(__file__).with_name("door_scripts.py"))
CLUSTER = str(ROOT / "examples/clusters/cpu_4.yaml")
ACCELERATE = {
    "fsdp": {"dp_shard": "4", "zero": "3", "recompute": "none"},
    "hsdp": {"dp_replicate": "2", "dp_shard": "2", "zero": "2", "recompute": "full"},
    "ddp": {"dp_replicate": "4", "zero": "0", "recompute": "none"},
}
TRANSFORMERS = {
    "fsdp and tp": {"tp": "2", "dp_shard": "2", "zero": "3"},
    "ddp and tp": {"tp": "2", "dp_replicate": "2", "zero": "0"},
}


def planned(folder: Path, fix: dict[str, str]) -> None:
    files, _ = plan_files(search(MODEL, CLUSTER, fix, None, ()), folder)
    plan_folder.write(folder, files)


def _started(folder: str) -> int:
    import accelerate  # noqa: F401  once, before the ranks

    return loose(4, [SCRIPT, folder])


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """All in one start, of processes that find what ``accelerate launch`` gives them."""
    folder = tmp_path_factory.mktemp("two_steps")
    jobs: list[tuple[str, str, str]] = []
    for name, fix in ACCELERATE.items():
        planned(folder / name, {**fix, "microbatch": "4"})
        setup = of_folder(folder / name)
        config = folder / f"{name}.yaml"
        if fix["zero"] == "0":  # on CPU, where it only replicates
            made = accelerate.export(setup)
            assert made.start == "torchrun --nproc-per-node 4 train.py"
            jobs.append((name, "accelerate", ""))
        else:  # it launches and shards on accelerators alone, see `door_scripts`
            made = accelerate.export(replace(setup, machines=Machines(1, 4, "H100")))
            config.write_text(made.files["accelerate.yaml"])
            jobs.append((name, "accelerate", str(config)))
    for name, fix in TRANSFORMERS.items():
        planned(folder / name, {**fix, "microbatch": "8", "recompute": "none"})
        export(Asked(str(folder / name)), "transformers", folder / f"{name} out")
        jobs.append((name, "transformers", str(folder / f"{name} out")))
    workload = load_workload(MODEL)
    assert workload.model is not None
    torch.manual_seed(workload.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workload.model().save_pretrained(folder / "weights")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    code, _, err = warm.done(_started, (str(folder),), ROOT)
    assert code == 0, err[-6000:]
    losses: dict[str, list[float]] = json.loads((folder / "losses.json").read_text())
    return losses | {"ours": list(run(folder / "hsdp", 2, quiet=True).losses)}


@pytest.mark.parametrize("name", [*ACCELERATE, *TRANSFORMERS])
def test_losses_are_ours(losses: dict[str, list[float]], name: str) -> None:
    assert len(losses[name]) == 2
    assert losses[name] == pytest.approx(losses["ours"], rel=2e-6)
