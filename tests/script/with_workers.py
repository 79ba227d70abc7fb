"""A training script whose loader reads by worker processes, for `test_sigterm`.

python with_workers.py PLAN CHECKPOINTS LOSSES STEPS
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import autopar
from tests.script.models import Dropping, words

SLEEP_S = 0.05


class Slow:
    """Samples that take a while to read, so that a signal finds workers at it."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> dict[str, Any]:
        time.sleep(SLEEP_S)
        return {name: value[0] for name, value in words(1, i % 40).items()}


def note(number: int) -> None:
    Path(f"{sys.argv[3]}.workers").open("a").write(f"{os.getpid()}\n")


def main(plan: str, checkpoints: str, losses: str, steps: int) -> None:
    trainer = autopar.load(plan, model=Dropping)
    loader = trainer.loader(
        Slow(), shuffle=True, num_workers=2, persistent_workers=True, worker_init_fn=note
    )
    trainer.keep_checkpoints(checkpoints)
    rank = int(os.environ.get("RANK", "0"))
    for batch in loader:
        loss = float(trainer.step(batch))
        if rank == 0:
            with Path(losses).open("a") as to:
                to.write(f"{trainer.step_number} {loss!r}\n")
        if trainer.step_number == steps:
            return


if __name__ == "__main__":
    # Its workers inherit it. All threads would be more, but that has killed workers that hung.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
