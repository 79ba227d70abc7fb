"""Starting the process of a JAX job, which sees all devices of its plan.

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

from autopar.runtime.jobs.causes import killed_by
from autopar.runtime.jobs.failures import RankFailed, failure

COUNT = "--xla_force_host_platform_device_count"
LEVEL = "--xla_backend_optimization_level"
COMPARED = ("verify",)
"""Jobs whose programs run a step or two: they take half as long where LLVM does not optimise. What
XLA makes of a program before LLVM sees it, its collectives too, is the same."""
WORKER = "autopar.runtime.jobs.jax_worker"
DEVICES = {"cpu": "cpu", "cuda": "cuda"}


def launch(job: str, options: Mapping[str, Any], devices: int, device: str = "cpu") -> Any:
    """Runs a job of `autopar.runtime.jobs.jax_worker` where jax sees ``devices`` devices.

    Raises `RankFailed`, or the `UserError` of the process, as one of the same exit code.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as results:
        file = Path(results) / "result.json"
        sys.stdout.flush()
        env = environment(devices, device)
        if job in COMPARED and LEVEL not in env["XLA_FLAGS"]:
            env["XLA_FLAGS"] += f" {LEVEL}=0"
        code = worker([job, json.dumps(options), str(file)], env)
        if not file.exists():
            how = f"killed by {killed_by(code)}" if code < 0 else f"with exit code {code}"
            raise RankFailed(f"the JAX process ended without a result, {how}")
        answer = json.loads(file.read_text())
    if "error" in answer:
        raise failure(answer, "the JAX process")
    return answer["result"]


def worker(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """The exit code of `autopar.runtime.jobs.jax_worker` with these arguments."""
    return subprocess.run([sys.executable, "-m", WORKER, *arguments], env=env).returncode


def environment(devices: int, device: str) -> dict[str, str]:
    """This process's own, under which jax sees ``devices`` devices, virtual ones on the CPU."""
    made = dict(os.environ)
    flags = re.sub(rf"{COUNT}=\d+", "", made.get("XLA_FLAGS", ""))
    made["XLA_FLAGS"] = f"{flags} {COUNT}={devices}".strip()
    if device in DEVICES:
        made["JAX_PLATFORMS"] = DEVICES[device]
    return made
