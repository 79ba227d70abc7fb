"""The optimizer of a workload over the pieces that this rank holds.

AdamW and SGD work element by element, so updating pieces is updating the whole. The pieces are
plain tensors, whichever way they are held: the fused kernels run without DTensor's overhead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.held import Held
from autopar.runtime.shared.settings import ProgramError


def make_optimizer(workload: Workload, held: Iterable[Held]) -> torch.optim.Optimizer:
    """`torch.optim` AdamW or SGD as ``workload`` says, over the trainable pieces with rows."""
    # One group, because a list without parameters is refused: a small model may leave nothing here.
    return of_groups(workload, [{"params": [h.leaf for h in trainable(held)]}])


def of_groups(workload: Workload, group: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The same over groups of their own options."""
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(
            group,
            lr=workload.learning_rate,
            betas=workload.betas,
            eps=workload.eps,
            weight_decay=workload.weight_decay,
            fused=True,
        )
    if workload.optimizer == "sgd":
        return torch.optim.SGD(
            group,
            lr=workload.learning_rate,
            weight_decay=workload.weight_decay,
            fused=True,
        )
    raise ProgramError(f"optimizer {workload.optimizer!r}: choose adamw or sgd")


def trainable(held: Iterable[Held]) -> list[Held]:
    """What the optimizer updates: FSDP2 may leave a rank without a row of a small parameter."""
    return [h for h in held if h.leaf.requires_grad and h.leaf.numel()]
