"""torch's own pipeline runtime on the same lists and modules, as referee."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from autopar.pipeline.actions import Schedule
from autopar.runtime.pytorch.pipeline.stages import Stages
from tests.runtime.pipelined_models import LENGTH, VOCABULARY, WIDTH

REFEREE: Any = theirs
C = torch.contiguous_format
KINDS = {
    "F": REFEREE.FORWARD,
    "B": REFEREE.FULL_BACKWARD,
    "I": REFEREE.BACKWARD_INPUT,
    "W": REFEREE.BACKWARD_WEIGHT,
}


class WholeGradient(torch.autograd.Function):
    """``x``, whose gradient is contiguous: torch sends it as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.contiguous()


class Chained(nn.Module):
    """A stage of the GPT as torch wants it: outputs that are contiguous and no views, and the
    logits where ours has the loss."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            x = WholeGradient.apply(x)  # type: ignore[no-untyped-call]
        result: Tensor = self.stage.blocks(x)  # type: ignore[operator]
        return result if result.shape[-1] == VOCABULARY else result.clone(memory_format=C)


def gradients(
    planned: Schedule, ours: Stages, batch: dict[str, Tensor], rows: int
) -> dict[str, Tensor]:
    """Of this rank's parameters, by stage and name; ``ours`` keeps none of its own."""
    ours.zero_grad()
    count = len(planned.ranks)
    with torch.device("meta"):
        between = torch.empty(rows, WIDTH, LENGTH, dtype=torch.float64, requires_grad=True)
        logits = torch.empty(rows, LENGTH, VOCABULARY, dtype=torch.float64, requires_grad=True)
        first = torch.empty(rows, LENGTH, dtype=torch.int64)
    stages = [
        PipelineStage(
            Chained(run.storage.model),
            n,
            count,
            torch.device("cpu"),
            input_args=first if n == 0 else between,
            output_args=logits if n == count - 1 else between,
            group=ours.ranks.group("pp"),
        )
        for n, run in ours.runs.items()
    ]
    total = batch["labels"].numel()

    def loss(made: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(made.flatten(0, 1), labels.flatten(), reduction="sum") / total

    runtime = REFEREE._PipelineScheduleRuntime(
        stages, planned.microbatches, loss_fn=loss, scale_grads=False
    )
    lists = {
        rank: [REFEREE._Action(a.stage, KINDS[a.kind], a.microbatch) for a in actions]
        for rank, actions in enumerate(planned.lists)
    }
    runtime._prepare_schedule_with_comms(lists)
    has_first, has_last = 0 in ours.runs, count - 1 in ours.runs
    runtime.step(
        *([batch["tokens"]] if has_first else []),
        target=batch["labels"] if has_last else None,
        losses=[] if has_last else None,
    )
    by_name = {
        f"{n}.{h.name}": h.leaf.grad.clone()
        for n, run in ours.runs.items()
        for h in run.storage.held.values()
        if h.leaf.grad is not None
    }
    ours.zero_grad()
    return by_name
