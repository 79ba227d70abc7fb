"""Two steps of a small Llama in other trainers, export by export: the job of `test_two_steps`.

torchrun --nproc-per-node 4 door_scripts.py FOLDER

FOLDER/jobs.json lists name, trainer and the trainer's file of each; FOLDER/losses.json gets the
losses by name.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

STEPS = 2
OF_ACCELERATE = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Beginnings of the variables in which its launcher hands on what a configuration file says."""


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


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """With ``variables`` as those of Accelerate."""
    others = {n: v for n, v in os.environ.items() if not n.startswith(OF_ACCELERATE)}
    with patch.dict(os.environ, {**others, **variables}, clear=True):
        yield


def launched(config: str) -> dict[str, str]:
    """The variables that ``accelerate launch --config_file config`` starts a process with."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = launch.launch_command_parser().parse_args(["--config_file", config, "script.py"])
    arguments, *_ = launch._validate_launch_command(arguments)
    given = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in given.items() if name.startswith(OF_ACCELERATE)}


@contextmanager
def pretended_accelerators() -> Iterator[None]:
    """Accelerate launches and shards on accelerators alone; here the devices of its GPU path are
    CPU cores, and gloo is their backend."""
    from accelerate import DistributedType, state

    def backend(*_: object, **__: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    with (
        patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"),
        patch.object(state.PartialState, "_prepare_backend", backend),
    ):
        yield


def of_accelerate(workload: Any, config: str) -> list[float]:
    """``config``: its file; empty where torchrun starts it."""
    with environment(launched(config) if config else {}):
        if not config:
            return _of_accelerate(workload, cpu=True)
        assert os.environ["ACCELERATE_USE_FSDP"] == "true"
        with pretended_accelerators():
            return _of_accelerate(workload, cpu=False)


def _of_accelerate(workload: Any, cpu: bool) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # a process has one, of the job before
    accelerator = Accelerator(cpu=cpu)
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


def of_transformers(workload: Any, export: str) -> list[float]:
    with environment({}):
        return _of_transformers(workload, export)


def _of_transformers(workload: Any, export: str) -> list[float]:
    from transformers import AutoModelForCausalLM

    config = runpy.run_path(f"{export}/autopar_distributed.py")["distributed_config"]()
    model = AutoModelForCausalLM.from_pretrained(
        Path(export).with_name("weights"), distributed_config=config
    )
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


TRAINERS = {"accelerate": of_accelerate, "transformers": of_transformers}


def main(folder: str) -> None:
    workload = runpy.run_path(str(Path(__file__).with_name("two_layers.py")))["workload"]
    dist.init_process_group("gloo")
    jobs = json.loads(Path(folder, "jobs.json").read_text())
    losses = {name: TRAINERS[trainer](workload, file) for name, trainer, file in jobs}
    if dist.get_rank() == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # threads of gloo that outlive the groups abort an interpreter that ends


if __name__ == "__main__":
    main(*sys.argv[1:])
