"""What a training process holds before its model, and takes to get there."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from autopar.runtime.jobs.host_memory import forget_peak, resident_bytes
from autopar.runtime.profile.bench import Bench


def measure_process(bench: Bench) -> None:
    """Memory that a training process holds before its model, and how long it takes to get there.

    That is the interpreter, torch, the process groups, and what checking the plan against the
    model needs; the fullest process counts.
    """
    if any(subject == "process" for subject, *_ in bench.known):
        return
    began = time.perf_counter()
    _train_something(bench.device)
    took = time.perf_counter() - began
    held = torch.tensor(resident_bytes(), dtype=torch.int64, device=bench.device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    bench.write("process", "start", float(held), 0.0, [took] * 2)
    if bench.device.type == "cpu":
        before, began = resident_bytes(), time.perf_counter()
        if _import_models():
            took = time.perf_counter() - began
            added = torch.tensor(resident_bytes() - before, dtype=torch.int64)
            dist.all_reduce(added, op=dist.ReduceOp.MAX)
            bench.write("process", "transformers", max(1.0, float(added)), 0.0, [took] * 2)
        before, began = resident_bytes(), time.perf_counter()
        forget_peak()
        lived = _train_known()
        took = time.perf_counter() - began
        grown = torch.tensor(resident_bytes(peak=True) - before, dtype=torch.int64)
        dist.all_reduce(grown, op=dist.ReduceOp.MAX)
        bench.write("process", "grown", float(grown), 0.0, [took] * 2)
        bench.write("process", "lived", float(lived), 0.0, [took] * 2)


def _import_models() -> bool:
    """Imports what models of the Hugging Face library need; False where it is not installed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return False
    with torch.device("meta"):
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=64, vocab_size=64))
    return True


def _train_known() -> int:
    """Trains layers of known sizes; returns the bytes that live at the worst moment of a step."""
    width, layers, rows = 1024, 8, 512
    model = torch.nn.Sequential(
        *(m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU()))
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4):
        optimizer.zero_grad()
        wrapped(torch.rand(rows, width)).square().mean().backward()
        optimizer.step()
    held = sum(p.numel() for p in model.parameters())
    # Parameters, gradients and two slots; what the products and the loss save; two gradients.
    return 4 * (4 * held + (layers + 4) * rows * width)


def _train_something(device: torch.device) -> None:
    """Captures and trains a model of a few numbers: loads all that a training process loads."""
    from autopar.frontends.dispatch import capture
    from autopar.nouns.workload import Workload

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.line(x)
            return y.square().mean()

    capture(Workload(model=Line, batch=lambda: {"x": torch.zeros(4, 8)}))
    model = Line().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        wrapped(torch.zeros(4, 8, device=device)).backward()
        optimizer.step()
