"""Two steps of the Llama example in another trainer, one loss a line: a job of `test_two_steps`.

accelerate launch --config_file accelerate.yaml door_scripts.py accelerate
torchrun door_scripts.py transformers FOLDER_OF_THE_WEIGHTS FOLDERS_OF_EXPORTS
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
STEPS = 2


def optimizer_of(model: Any, workload: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=workload.learning_rate,
        betas=workload.betas,
        eps=workload.eps,
        weight_decay=workload.weight_decay,
    )


def part(batch: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The samples of one data rank."""
    return {name: value.chunk(ranks)[rank] for name, value in batch.items()}


def pretend_accelerators() -> None:
    """Accelerate launches and shards on accelerators alone; here the devices of its GPU path are
    CPU cores, and gloo is their backend."""
    from accelerate import DistributedType, state

    def backend(*_: object, **__: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    state.PartialState._prepare_backend = backend


def of_accelerate(workload: Any) -> list[float]:
    from accelerate import Accelerator

    shards = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if shards:
        pretend_accelerators()
    accelerator = Accelerator(cpu=not shards)
    torch.manual_seed(workload.seed)
    model = workload.model()
    model, optimizer = accelerator.prepare(model, optimizer_of(model, workload))
    losses = []
    for step in range(STEPS):
        rows = part(workload.batch(step), accelerator.process_index, accelerator.num_processes)
        loss = model(**rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def of_transformers(workload: Any, weights: str, *exports: str) -> list[float]:
    dist.init_process_group("gloo")
    return [loss for export in exports for loss in _of_export(workload, weights, export)]


def _of_export(workload: Any, weights: str, export: str) -> list[float]:
    from transformers import AutoModelForCausalLM

    config = runpy.run_path(f"{export}/autopar_distributed.py")["distributed_config"]()
    model = AutoModelForCausalLM.from_pretrained(weights, distributed_config=config)
    model.train()
    optimizer = optimizer_of(model, workload)
    data_rank = dist.get_rank() // config.tp_size
    losses = []
    for step in range(STEPS):
        loss = model(**part(workload.batch(step), data_rank, config.dp_size)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def main(trainer: str, *folders: str) -> None:
    workload = runpy.run_path(str(ROOT / "examples/03_llama.py"))["workload"]
    made = (
        of_accelerate(workload) if trainer == "accelerate" else of_transformers(workload, *folders)
    )
    if dist.get_rank() == 0:
        print("\n".join(f"loss {loss!r}" for loss in made), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
