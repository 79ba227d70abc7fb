"""What each process of a JAX job does in `test_processes`.

    python -m tests.jax.of_several_processes <its number> <port> <folder>

Two devices each; the last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import quick_xla

FLAGS = " ".join(("--xla_force_host_platform_device_count=2", *quick_xla.FLAGS))


def optimizer() -> Any:
    """One that keeps random keys."""
    import jax
    import optax

    return optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(7)), optax.adam(1e-2))


def main(number: int, port: int, folder: Path) -> dict[str, Any]:
    import jax

    import autopar
    from autopar.nouns.errors import UserError
    from tests.jax import test_script as script
    from tests.plans import cluster

    jax.distributed.initialize(f"localhost:{port}", 2, number)
    own = folder / str(number)  # as on machines without a shared file system
    own.mkdir()
    fix = {"dp_shard": 2, "tp": 2, "zero": 1}
    with jax.enable_x64(True):
        given = {"params": script.start()}
        plan = autopar.plan(
            script.MODEL.loss, script.batch(), cluster(4), fix, own / "plan", **given
        )
        trainer = autopar.load(plan, model=script.MODEL.loss, optimizer=optimizer(), **given)
        losses = [float(trainer.step(script.batch(step))) for step in range(2)]
        trainer.save(folder / "checkpoint")
        losses.append(float(trainer.step(script.batch(2))))
        trainer.load(folder / "checkpoint")
        again = float(trainer.step(script.batch(2)))
        evaluated = [float(trainer.evaluate(script.batch(3, n))) for n in (8, 3)]
        refused = ""
        try:  # a place that the first process alone finds taken
            trainer.save(folder / "taken")
        except UserError as error:
            refused = str(error)
    return {"losses": losses, "again": again, "evaluated": evaluated, "refused": refused}


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = FLAGS
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
