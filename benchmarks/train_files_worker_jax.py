"""The process of `benchmarks.train_files` for JAX: the trainer beside ``train.py`` alone.

    python -m benchmarks.train_files_worker_jax <folder with folders.json>

``train.py`` runs in a process of its own without autopar, `benchmarks.train_alone`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.runtime.jax.load import load
from autopar.runtime.shared.planned_batch import batch_of

STEPS = 3
ALONE = Path(__file__).with_name("train_alone.py")


def compared(folder: str, out: Path) -> str:
    """What differs between `STEPS` steps of ``train.py`` and of the trainer, in this process."""
    trainer = load(folder, check_model=False)
    workload = trainer.workload
    stands = [_loss(trainer.step(batch_of(workload, step))) for step in range(STEPS)]
    wanted = _held(trainer.state)
    given = [str(Path(folder) / "program"), str(STEPS), str(out)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ALONE), *given]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=out.parent)
    if done.returncode:
        return f"train.py alone: {' '.join(done.stderr.split()[-40:])}"
    losses, own = pickle.loads(out.read_bytes())
    names = wanted.keys() | own.keys()
    differing = sorted(name for name in names if wanted.get(name) != own.get(name))
    if stands != losses:
        differing.insert(0, f"losses {losses} for {stands}")
    return ", ".join(differing[:3])


def _loss(made: Any) -> bytes:
    """Of a step's result, which is a pair where the loss function returns more."""
    return np.asarray(made[0] if isinstance(made, tuple) else made).tobytes()


def _held(state: Any) -> dict[str, bytes]:
    """What every device holds of every array of the state."""
    return {
        f"{jax.tree_util.keystr(path)} on {shard.device}": np.asarray(shard.data).tobytes()
        for path, array in jax.tree_util.tree_leaves_with_path(state)
        for shard in array.addressable_shards
    }


def main() -> None:
    where = Path(sys.argv[1])
    folders = json.loads((where / "folders.json").read_text())
    results = {f: compared(f, where / "alone.pickle") for f in folders}
    (where / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
