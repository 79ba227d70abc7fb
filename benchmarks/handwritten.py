"""The benchmark GPT parallelized by hand, as PyTorch's own documentation does it.

Each maker takes the model as one device would build it and returns a step: global batch -> loss.
Every side sees the same batches, trains with the same fused AdamW, and ends a step with the global
mean loss on every rank, which the emitted programs compute too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpt import GPT, LEARNING_RATE

Step = Callable[[dict[str, Tensor]], float]


def ddp() -> Step:
    model = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    return _data_parallel(model, _adamw(model))


def fsdp() -> Step:
    """FSDP2, every block a unit, parameters dropped after forward (ZeRO 3)."""
    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _data_parallel(model, _adamw(model))


def tensor_parallel() -> Step:
    """Megatron's layout; the residual stream is whole on every rank."""
    block = {
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    outer = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return _model_parallel(block, outer)


def sequence_parallel() -> Step:
    """The same, with the residual stream split over the sequence between the matrix products."""
    block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    outer = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    return _model_parallel(block, outer)


BY_HAND: dict[str, Callable[[], Step]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "tensor_parallel": tensor_parallel,
    "sequence_parallel": sequence_parallel,
}


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, because the fused kernel takes no plain tensors together with DTensors."""
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": group} for group in (split, plain) if group]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.01, fused=True)


def _data_parallel(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    rank, ways = dist.get_rank(), dist.get_world_size()

    def step(batch: dict[str, Tensor]) -> float:
        loss = model(**{name: rows.chunk(ways)[rank] for name, rows in batch.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ways
        dist.all_reduce(mean)
        return float(mean)

    return step


def _model_parallel(block: dict[str, Any], outer: dict[str, Any]) -> Step:
    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, outer)
    for layer in model.blocks:
        parallelize_module(layer, mesh, block)
    optimizer = _adamw(model)

    def step(batch: dict[str, Tensor]) -> float:
        with loss_parallel():  # logits stay split over the vocabulary
            loss = model(**batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach().full_tensor())

    return step
