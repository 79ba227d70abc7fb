"""1F1B over the emitted stages without any schedule runtime: sends and calls written out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.pytorch.pipeline.stages import Stages


def one_forward_one_backward(
    stages: Stages, microbatches: int
) -> Callable[[Mapping[str, Any]], None]:
    """Of a chain of one stage a rank: warm up, then one forward and one backward in turns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (run,) = stages.runs.values()
    model, values = run.storage.model, run.values
    before = next((values[n].shape for n in run.stage.takes if n in values), ())
    after = next((values[n].shape for n in run.stage.gives if n in values), ())
    ahead = min(ranks - rank - 1, microbatches)

    def step(batch: Mapping[str, Any]) -> None:
        tokens, targets = (batch[n].chunk(microbatches) for n in ("tokens", "targets"))
        counts = {"loss": (batch["targets"] != -100).sum()}
        alive: deque[tuple[Tensor | None, Tensor]] = deque()
        sent: list[Any] = []

        def send(tensor: Tensor, to: int) -> None:
            sent.append((dist.isend(tensor, to), tensor))

        def receive(shape: tuple[int, ...], source: int) -> Tensor:
            tensor = torch.empty(shape)
            dist.recv(tensor, source)
            return tensor

        def forward(i: int) -> None:
            x = receive(before, rank - 1).requires_grad_() if rank else None
            if rank == 0:
                y = model(tokens[i])
            elif rank < ranks - 1:
                y = model(x)
            else:
                y = model(targets[i], x, counts)
            if rank < ranks - 1:
                send(y.detach(), rank + 1)
            alive.append((x, y))

        def backward() -> None:
            x, y = alive.popleft()
            if rank < ranks - 1:
                y.backward(receive(after, rank + 1))  # type: ignore[no-untyped-call]
            else:
                y.backward()  # type: ignore[no-untyped-call]
            if x is not None:
                assert x.grad is not None
                send(x.grad, rank - 1)

        for i in range(ahead):
            forward(i)
        for i in range(ahead, microbatches):
            forward(i)
            backward()
        for _ in range(ahead):
            backward()
        for work, _ in sent:
            work.wait()

    return step
