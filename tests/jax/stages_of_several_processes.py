"""What each process of a JAX job does in `test_stages_of_processes`.

    python -m tests.jax.stages_of_several_processes <its number> <port> <folder>

Two devices each; the last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import quick_xla

FLAGS = " ".join(("--xla_force_host_platform_device_count=2", *quick_xla.FLAGS))
FIXES: dict[str, dict[str, Any]] = {
    "a place each": {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatch": 2},
    "two places each": {"pp": 4, "schedule": "zb-h1", "microbatch": 2},
    "two routes": {"pp": 4, "schedule": "chimera", "microbatch": 2},
    "none": {"dp_replicate": 2},
}
"""Layouts that a training goes through in turn."""
STEPS = 2


def workload() -> tuple[Any, Any]:
    """A loss whose head is the table of its words, and parameters."""
    from tests.jax import models

    model = models.llama(layers=4)
    return model, models.concrete(model.params, "float64", seed=5)


def batch(model: Any, seed: int) -> Mapping[str, np.ndarray[Any, Any]]:
    from tests.jax import models

    made = models.concrete(model.batch, "float64", seed=seed)
    return {name: np.asarray(a) for name, a in made.items()}


def trained(home: Path, name: str, checkpoints: Path, before: str = "") -> dict[str, Any]:
    """Goes on under one layout from the checkpoint of the one ``before``, and saves."""
    import autopar
    from autopar.nouns.errors import UserError
    from tests.plans import cluster

    model, params = workload()
    devices = cluster(2 if name == "none" else 4)
    plan = autopar.plan(
        model.loss, batch(model, 0), devices, FIXES[name], home / name,
        params=params, clip_norm=0.1,
    )  # fmt: skip
    trainer = autopar.load(plan, model=model.loss, params=params)
    if before:
        trainer.load(checkpoints / before)
    first = trainer.step_number
    losses = [float(trainer.step(batch(model, first + i))) for i in range(STEPS)]
    made: dict[str, Any] = {"losses": losses, "norm": float(trainer.gradient_norm)}
    if name != "none":
        made["played"] = [str(one.action) for one in trainer.compiled.log]
        made["peak"] = trainer.peak_memory_bytes
    made["evaluated"] = float(trainer.evaluate(batch(model, 99)))
    trainer.save(checkpoints / name)
    try:
        made["params"] = len(trainer.params)
    except UserError as error:
        made["refused"] = str(error)
    return made


def main(number: int, port: int, folder: Path) -> dict[str, Any]:
    import jax

    jax.distributed.initialize(f"localhost:{port}", 2, number)
    home = folder / str(number)  # as on machines without a shared file system
    home.mkdir()
    before, made = "", {}
    with jax.enable_x64(True):
        for name in FIXES:
            if name != "none":
                made[name] = trained(home, name, folder / "checkpoints", before)
                before = name
    return made


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = FLAGS
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
