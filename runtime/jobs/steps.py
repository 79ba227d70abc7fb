"""The steps of a job, whichever framework takes them: printed, checked and saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Protocol

from autopar.nouns.workload import Workload
from autopar.runtime.shared.divergence import check_loss
from autopar.runtime.shared.planned_batch import batch_of

Batches = Callable[[Workload, int], Any]
Phases = Mapping[str, float]
"""Seconds of one step by phase, see `autopar.runtime.pytorch.phases`."""


class StepTrainer(Protocol):
    """What a job needs of a trainer."""

    workload: Workload

    @property
    def step_number(self) -> int: ...

    def step(self, batch: Any) -> Any: ...

    def save(self, folder: str) -> None: ...


def take_steps(
    trainer: StepTrainer,
    options: Mapping[str, Any],
    where: dict[str, str],
    predicted_s: float,
    batches: Batches = batch_of,
    phases: Callable[[], Phases] = dict,
) -> dict[str, Any]:
    """``steps`` steps, saved at the end and after every ``save_every``; fields of a `RunResult`.

    ``where["step"]`` says what is being done; ``quiet``: nothing is printed. Raises `Diverged`.
    """
    losses, times, split = [], [], []
    for _ in range(options["steps"]):
        step = trainer.step_number
        where["step"] = f"in step {step}"
        batch = batches(trainer.workload, step)
        begin = time.perf_counter()
        loss = trainer.step(batch)
        losses.append(float(loss[0] if trainer.workload.has_aux else loss))
        times.append(time.perf_counter() - begin)
        split.append(phases())
        if not options["quiet"]:
            print(
                f"step {step}  loss {losses[-1]:.6f}  {times[-1]:.4f} s "
                f"(predicted {predicted_s:.4f} s)",
                flush=True,
            )
        check_loss(losses, step, trainer.workload)
        every = options["save_every"]
        if options["save"] and every and trainer.step_number % every == 0:
            trainer.save(options["save"])
    if options["save"]:
        where["step"] = "while saving"
        trainer.save(options["save"])
    settled = times[1:] or times  # the first step compiles, and pays for buffers and caches
    rows = split[1:] or split
    return {
        "losses": losses,
        "step_time_s": median(settled) if settled else 0.0,
        "predicted_step_time_s": predicted_s,
        "step": trainer.step_number,
        "phases_s": {p: median(row[p] for row in rows) for p in rows[0]} if rows else {},
    }
