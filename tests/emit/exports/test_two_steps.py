"""Accelerate and Transformers train two steps under an exported plan, with the losses of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples/03_llama.py")
SCRIPT = str(Path(__file__).with_name("door_scripts.py"))
CLUSTER = str(ROOT / "examples/clusters/cpu_4.yaml")


def planned(folder: Path, fix: dict[str, str]) -> list[float]:
    """Writes a plan and trains two steps under it."""
    files, _ = plan_files(search(MODEL, CLUSTER, fix, None, ()), folder)
    plan_folder.write(folder, files)
    return list(run(folder, 2, quiet=True).losses)


def losses(*command: str) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [float(text) for text in re.findall(r"^loss (\S+)$", done.stdout, re.M)]


@pytest.mark.parametrize(
    "fix",
    [
        {"dp_shard": "4", "zero": "3", "recompute": "none"},
        {"dp_replicate": "2", "dp_shard": "2", "zero": "2", "recompute": "full"},
        {"dp_replicate": "4", "zero": "0", "recompute": "none"},
    ],
    ids=["fsdp", "hsdp", "ddp"],
)
def test_accelerate(tmp_path: Path, fix: dict[str, str]) -> None:
    ours = planned(tmp_path / "plan", {**fix, "microbatch": "4"})
    setup = of_folder(tmp_path / "plan")
    if fix["zero"] == "0":  # on CPU, where it only replicates
        made = accelerate.export(setup)
        assert made.start == "torchrun --nproc-per-node 4 train.py"
        command = ["torch.distributed.run", "--nproc-per-node", "4"]
    else:  # it launches and shards on accelerators alone, see `door_scripts`
        made = accelerate.export(replace(setup, machines=Machines(1, 4, "H100")))
        config = tmp_path / "accelerate.yaml"
        config.write_text(made.files["accelerate.yaml"])
        command = ["accelerate.commands.launch", "--config_file", str(config)]
    theirs = losses(*command, SCRIPT, "accelerate")
    assert theirs == pytest.approx(ours, rel=2e-6)


def test_transformers(tmp_path: Path) -> None:
    """Both layouts in one start: four processes that import the library cost most of it."""
    fixes = (
        {"tp": "2", "dp_shard": "2", "zero": "3"},
        {"tp": "2", "dp_replicate": "2", "zero": "0"},
    )
    ours: list[float] = []
    exports = []
    for fix in fixes:
        folder = tmp_path / f"zero {fix['zero']}"
        ours += planned(folder / "plan", {**fix, "microbatch": "8", "recompute": "none"})
        export(Asked(str(folder / "plan")), "transformers", folder / "out")
        exports.append(str(folder / "out"))
    workload = load_workload(MODEL)
    assert workload.model is not None
    torch.manual_seed(workload.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workload.model().save_pretrained(tmp_path / "weights")
    torchrun = ("torch.distributed.run", "--nproc-per-node", "4")
    theirs = losses(*torchrun, SCRIPT, "transformers", str(tmp_path / "weights"), *exports)
    assert theirs == pytest.approx(ours, rel=2e-6)
