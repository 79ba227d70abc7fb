"""What a step tells those who asked: see `Trainer.on_step`."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.nouns.prediction import Prediction
from autopar.runtime.pytorch.accelerators import is_accelerator, module_of


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of the step before.

    gradient_norm:    before clipping; None where nobody asked for it.
    learning_rate:    of the optimizer's first group, as it was in the step.
    tokens_per_s:     of all devices; None where the batch has no tokens.
    mfu:              the model's FLOPs in a second, of what the devices could; None: not known.
    memory_bytes:     the most that this process had so far: resident, or on a GPU allocated.
    """

    step: int
    loss: torch.Tensor
    gradient_norm: torch.Tensor | None
    time_s: float
    learning_rate: float = 0.0
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_bytes: int = 0

    def numbers(self) -> dict[str, float]:
        """All that is known, by name, as loggers take it; on a GPU this waits for the step."""
        named = {
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "learning_rate": self.learning_rate,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "step_time_s": self.time_s,
        }
        return {name: float(value) for name, value in named.items() if value is not None}


OnStep = Callable[[Metrics], object]
"""Called by every rank after each step, so that a rank may log and another not."""


def measured(
    step: int,
    loss: torch.Tensor,
    norm: torch.Tensor | None,
    time_s: float,
    optimizer: torch.optim.Optimizer,
    predicted: Prediction | None,
    device: torch.device,
) -> Metrics:
    """``predicted``: of the plan, whose work and tokens a step has."""
    faster = None if predicted is None or not time_s else predicted.step_time_s / time_s
    tokens = None if predicted is None else predicted.tokens_per_s
    return Metrics(
        step,
        loss,
        norm,
        time_s,
        learning_rate=float(optimizer.param_groups[0]["lr"]),
        tokens_per_s=None if faster is None or tokens is None else tokens * faster,
        mfu=None if faster is None or predicted is None else predicted.mfu * faster,
        memory_bytes=module_of(device).max_memory_allocated(device)
        if is_accelerator(device)
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
