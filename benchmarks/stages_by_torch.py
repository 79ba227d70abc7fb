"""The emitted stages under torch's stock schedule classes (`torch.distributed.pipelining`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from autopar.runtime.pytorch.pipeline.stages import Stages

COUNTS = "counts"


class Called(nn.Module):
    """A stage as torch calls it: a value in, or the batch's; a value out, or the loss as [1]."""

    def __init__(self, stage: nn.Module, takes: tuple[str, ...], count: Mapping[str, Tensor]):
        super().__init__()
        self.stage, self.takes, self.count = stage, takes, count

    def forward(self, *values: Tensor, **batch: Tensor) -> Tensor:
        given = iter(values)
        arguments = [
            self.count if name == COUNTS else batch[name] if name in batch else next(given)
            for name in self.takes
        ]
        made: Tensor = self.stage(*arguments)
        return made.reshape(1) if made.ndim == 0 else made


def stock(name: str, stages: Stages, microbatches: int) -> Callable[[Mapping[str, Any]], None]:
    """``schedule.step`` of torch's class ``name`` over the stages of this rank."""
    total = len(stages.runs) * dist.get_world_size()
    values = next(iter(stages.runs.values())).values
    labelled: dict[str, Tensor] = {"loss": torch.ones(())}
    made = []
    for number, run in stages.runs.items():
        takes = run.stage.takes
        with torch.device("meta"):
            like = {n: torch.empty(v.shape, requires_grad=v.gradient) for n, v in values.items()}
            loss = torch.empty(1, requires_grad=True)
        into = [like[n] for n in takes if n in like]
        out = [like[n] for n in run.stage.gives if n in like] or [loss]
        made.append(
            pipelining.PipelineStage(
                Called(run.storage.model, takes, labelled),
                number,
                total,
                torch.device("cpu"),
                input_args=tuple(into) or _batch_like(stages, takes, microbatches),
                output_args=tuple(out),
                group=stages.ranks.group("pp"),
            )
        )
    kind: Any = getattr(pipelining, name)
    single = len(made) == 1
    schedule = kind(
        made[0] if single else made,
        microbatches,
        loss_fn=lambda loss, target: loss.sum(),
        scale_grads=False,
    )
    has_first, has_last = 0 in stages.runs, total - 1 in stages.runs

    def step(batch: Mapping[str, Any]) -> None:
        labelled["loss"] = (batch["targets"] != -100).sum()
        schedule.step(
            *([batch["tokens"]] if has_first else []),
            target=batch["targets"] if has_last else None,
            losses=[] if has_last else None,
            **({"targets": batch["targets"]} if has_last else {}),
        )

    return step


def _batch_like(stages: Stages, takes: tuple[str, ...], microbatches: int) -> tuple[Tensor, ...]:
    from benchmarks.gpt import batch

    whole = batch()
    with torch.device("meta"):
        return tuple(
            torch.empty(
                (whole[n].shape[0] // microbatches, *whole[n].shape[1:]), dtype=whole[n].dtype
            )
            for n in takes
            if n in whole
        )
