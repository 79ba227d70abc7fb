"""The process of `benchmarks.train_files` for JAX: `main` of ``train.py`` beside the trainer.

    python -m benchmarks.train_files_worker_jax <folder with folders.json>

As `benchmarks.train_files_worker`, in one process that sees all devices.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.runtime.jax.load import load, read
from autopar.runtime.jax.training import global_batch
from autopar.runtime.shared.program_module import read_train

STEPS = 3


def compared(folder: str) -> str:
    """What differs between `STEPS` steps of ``train.py`` and of the trainer."""
    trainer, program = load(folder, check_model=False), read(folder, check_model=False)
    stands = [_loss(trainer.step(global_batch(program, step))) for step in range(STEPS)]
    module: Any = read_train(folder)
    plain = module.Step
    losses: list[float] = []
    state: dict[str, Any] = {}

    def recorded(*given: Any) -> Any:
        made = plain(*given)
        step = made.step

        def with_loss(*given: Any) -> Any:
            nonlocal state
            state, loss, *rest = step(*given)
            losses.append(_loss(loss))
            return state, loss, *rest

        made.step = with_loss
        return made

    module.Step = recorded
    with redirect_stdout(StringIO()):
        module.main(STEPS)
    wanted, own = _held(trainer.state), _held(state)
    differing = sorted(name for name in wanted.keys() | own.keys() if wanted[name] != own[name])
    if stands != losses:
        differing.insert(0, f"losses {losses} for {stands}")
    return ", ".join(differing[:3])


def _loss(made: Any) -> float:
    """Of a step's result, which is a pair where the loss function returns more."""
    return float(made[0] if isinstance(made, tuple) else made)


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
    (where / "results.json").write_text(json.dumps({f: compared(f) for f in folders}))


if __name__ == "__main__":
    main()
