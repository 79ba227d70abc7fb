"""Forward and backward of a program of one stage, microbatch after microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.jobs.phases import Stopwatch
from autopar.runtime.pytorch.own_functions import gradients_scaled
from autopar.runtime.pytorch.storage import Storage


def accumulate(
    storage: Storage,
    ready: Callable[[int], Mapping[str, Any]],
    count: int,
    watch: Stopwatch,
    sum_over_data: Callable[[torch.Tensor], dist.Work | None],
) -> tuple[torch.Tensor, dist.Work | None]:
    """The loss of ``count`` microbatches, which ``ready`` gives, and the sum over data ranks that
    it is still in.

    Afterwards `Storage.collect` gives the gradients.
    """
    scale = storage.grad_scale
    loss = torch.zeros((), device=storage.ranks.device)
    work: dist.Work | None = None
    with gradients_scaled(scale):
        for i in range(count):
            last = i == count - 1
            with storage.microbatch(last):
                share = storage.call(**ready(i))
                watch.lap("forward")
                loss = loss + share.detach()
                if last:
                    work = sum_over_data(loss)
                torch.autograd.backward(share, torch.full_like(share, scale))
                watch.lap("backward")
    return loss, work
