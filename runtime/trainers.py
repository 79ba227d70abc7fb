"""``autopar.load``: the trainer of a plan, whichever framework its program is in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from autopar.files import plan_folder
from autopar.runtime.jobs.machine import check_device


class Trainer(Protocol):
    """What trainers of both frameworks do."""

    def step(self, batch: Any) -> Any:
        """One optimizer step on the global batch; returns its loss."""

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint of the whole model, which any plan of it can load."""

    def load(self, folder: str | Path) -> None:
        """Goes on from a checkpoint."""


def load(folder: str | Path, device: str = "auto") -> Trainer:
    """The trainer of the plan in ``folder``, with the initial weights of the original model.

    PyTorch: called by every process of a torchrun job. JAX: called once, by a process that sees all
    devices. Raises `UserError` where plan, program, model or devices do not fit together.
    """
    check_device(device)
    if plan_folder.read_plan(folder).framework == "jax":
        from autopar.runtime.jax import load as jax_load

        return jax_load.load(folder)
    from autopar.runtime.pytorch import load as loading

    return loading.load(folder, device)
