"""Running and verifying JAX plans on this machine: one process that sees the plan's devices.

Where jax has no accelerator, the devices are virtual ones of the CPU. Importing this module needs
no jax.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar import plan_folder
from autopar.errors import UserError
from autopar.nouns.style import style_of
from autopar.runtime.failures import RankFailed, failure
from autopar.runtime.launch import RunResult
from autopar.runtime.verified import VerifyResult

COUNT = "--xla_force_host_platform_device_count"
DEVICES = {"cpu": "cpu", "cuda": "cuda"}


def run(
    folder: str | Path,
    steps: int,
    *,
    resume: str | Path | None = None,
    save: str | Path | None = None,
    save_every: int = 0,
    device: str = "auto",
) -> RunResult:
    """Trains ``steps`` steps of the plan in ``folder``; loss and time of each go to stdout.

    See `autopar.runtime.launch.run`; the program is always compiled. Raises `RankFailed` and what
    loading the plan raises.
    """
    if steps < 0:
        raise UserError(f"--steps {steps}: give a number of steps, as in --steps 20")
    options = {
        "plan": str(folder),
        "steps": steps,
        "resume": str(resume) if resume else None,
        "save": str(save) if save else None,
        "save_every": save_every,
    }
    found = launch("run", options, plan_folder.read_plan(folder).device_count, device)
    return RunResult(**{**found, "losses": tuple(found["losses"]), "style": style_of("jax")})


def verify(folder: str | Path, device: str = "cpu") -> VerifyResult:
    """Compares the plan in ``folder`` with its loss function; see `VerifyResult`."""
    return verify_many([folder], device)[0]


def verify_many(folders: Sequence[str | Path], device: str = "cpu") -> list[VerifyResult]:
    """`verify` for several plans in one process."""
    counts = [plan_folder.read_plan(folder).device_count for folder in folders]
    options = {"plans": [str(folder) for folder in folders]}
    found = launch("verify", options, max(counts, default=1), device)
    return [VerifyResult.read(data) for data in found]


def launch(job: str, options: Mapping[str, Any], devices: int, device: str = "cpu") -> Any:
    """Runs a job of `autopar.runtime.jax_worker` where jax sees ``devices`` devices.

    Raises `RankFailed`, or the `UserError` of the process, as one of the same exit code.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as results:
        file = Path(results) / "result.json"
        command = [sys.executable, "-m", "autopar.runtime.jax_worker"]
        sys.stdout.flush()
        done = subprocess.run(
            [*command, job, json.dumps(options), str(file)],
            env=_environment(devices, device),
            check=False,
        )
        if not file.exists():
            why = f"was killed by signal {-done.returncode}" if done.returncode < 0 else "stopped"
            raise RankFailed(
                f"the JAX process {why} without a result (exit code {done.returncode})"
            )
        found = json.loads(file.read_text())
    if "error" in found:
        raise failure(found, "the JAX process")
    return found["result"]


def _environment(devices: int, device: str) -> dict[str, str]:
    environment = dict(os.environ)
    flags = re.sub(rf"{COUNT}=\d+", "", environment.get("XLA_FLAGS", ""))
    environment["XLA_FLAGS"] = f"{flags} {COUNT}={devices}".strip()
    if device in DEVICES:
        environment["JAX_PLATFORMS"] = DEVICES[device]
    return environment
