"""The training script of the examples against itself with DDP in autopar's place.

    python -m benchmarks.job [--rounds 40] [--steps 4] [--processes 2] [--json]

Both sides train the Llama of `examples/07_train_script.py` on its batches with its groups and
clipping, in the same processes: rounds of some steps take turns, and who goes first changes. A
ratio is the median over rounds of what a step of the one takes by what one of the other takes; both
sides must have the same losses. There are as many processes as cores, four at most: more of them
wait for each other's cores, those longest that talk most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show

SCRIPT = Path(__file__).parents[1] / "examples/07_train_script.py"
CLUSTER = """
name: processes
groups:
  - {{device: cpu-core, count: {0}}}
levels:
  - {{name: loopback, span: {0}, bandwidth: 1 GB/s, latency: 100 us, library: gloo}}
"""
LIMIT = 1.0
BATCH, LR, CLIP, DECAY = 16, 3e-4, 1.0, 0.1
Step = Callable[[], float]


def script() -> Any:
    """The example as a module."""
    spec = spec_from_file_location("train_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_autopar(example: Any, folder: Path, samples: list[Any]) -> tuple[Step, str]:
    import torch

    import autopar

    model = example.llama()
    optimizer = torch.optim.AdamW(example.groups(model, DECAY), lr=LR)
    batch = {name: torch.stack([value] * BATCH) for name, value in samples[0].items()}
    cluster = folder / "cluster.yaml"
    plan = autopar.plan(model, batch, cluster, folder=folder / "plan", clip_norm=CLIP)
    trainer = autopar.load(plan, model=model, optimizer=optimizer)
    taken = iter(trainer.loader(samples))
    return lambda: float(trainer.step(next(taken))), layout_of(repr(plan))


def layout_of(shown: str) -> str:
    return shown.partition(": ")[2].partition(";")[0]


def by_ddp(example: Any, samples: list[Any]) -> Step:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    model = DistributedDataParallel(example.llama())
    optimizer = torch.optim.AdamW(example.groups(model, DECAY), lr=LR)
    width = dist.get_world_size()
    sampler: Any = DistributedSampler(samples, shuffle=False)  # type: ignore[arg-type]
    taken: Any = iter(DataLoader(samples, BATCH // width, sampler=sampler))  # type: ignore[arg-type]

    def step() -> float:
        optimizer.zero_grad()
        loss = model(**next(taken)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        mean = loss.detach() / width
        dist.all_reduce(mean)
        return float(mean)

    return step


def measure(folder: Path, rounds: int, steps: int) -> None:
    """The worker; rank 0 leaves ``row.json``."""
    import torch.distributed as dist

    example = script()
    samples = example.text(0, BATCH * (1 + rounds) * steps)
    ours, layout = by_autopar(example, folder, samples)
    sides = {"autopar": ours, "ddp": by_ddp(example, samples)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(1 + rounds):  # the first is not counted
        losses: dict[str, list[float]] = {}
        for name in sorted(sides, reverse=bool(turn % 2)):
            dist.barrier()
            start = time.perf_counter()
            losses[name] = [sides[name]() for _ in range(steps)]
            dist.barrier()
            times[name].append((time.perf_counter() - start) / steps)
        apart = max(abs(a - b) for a, b in zip(losses["autopar"], losses["ddp"], strict=True))
        if apart > 1e-3:
            raise SystemExit(f"round {turn}: the losses are {apart:.2g} apart: {losses}")
    if dist.get_rank() == 0:
        counted = {name: seconds[1:] for name, seconds in times.items()}
        ratios = [a / b for a, b in zip(counted["autopar"], counted["ddp"], strict=True)]
        row = {
            "layout": layout,
            **{f"{name}_s": statistics.median(seconds) for name, seconds in counted.items()},
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        (folder / "row.json").write_text(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4, help="of one side in a round")
    own = min(4, max(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--processes", type=int, default=own, help="default: one for each core")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(Path(options.worker), options.rounds, options.steps)
        return
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "cluster.yaml").write_text(CLUSTER.format(options.processes))
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        run += [f"--nproc-per-node={options.processes}", "-m", "benchmarks.job"]
        run += [f"--rounds={options.rounds}", f"--steps={options.steps}", "--worker", scratch]
        subprocess.run(run, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        row = json.loads((Path(scratch) / "row.json").read_text())
    target = Target("a step with autopar / with DDP", row["ratio"], LIMIT)
    show([row], [target], options.json)


if __name__ == "__main__":
    main()
