"""What the processes of `benchmarks.collectives` run: algorithms played, and the slow link.

    ... -m benchmarks.collectives_ranks played FILE
    ... -m benchmarks.collectives_ranks slow FILE ROUNDS BYTES PER_HOST

started on every rank by `autopar.runtime.jobs.local_ranks` or torchrun. Rank 0 writes FILE. Times
are the slowest rank's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.nouns.axes import REPLICATE
from autopar.runtime.pytorch import played_collective
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.two_level import two_level_all_reduce
from benchmarks.collective_topologies import algorithms_for

PLAYED_BYTES = (4 << 10, 1 << 20)
PLAYED_ROUNDS = 5
Run = Callable[[Tensor], None]


def draw(size: int, rank: int) -> Tensor:
    """Whole numbers as float32, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (size,), generator=generator).float()


def exact(run: Run, size: int) -> bool:
    """Whether every rank ends with the sum of all ranks' numbers, to the bit."""
    right = torch.stack([draw(size, rank) for rank in range(dist.get_world_size())]).sum(0)
    x = draw(size, dist.get_rank())
    run(x)
    agree = torch.tensor([float(torch.equal(x, right))])
    dist.all_reduce(agree, dist.ReduceOp.MIN)
    return bool(agree)


def seconds(run: Run, x: Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    run(x)
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def interleaved(runs: Mapping[str, Run], size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each in every round; the order turns, so that none is always behind another."""
    names = list(runs)
    x = torch.zeros(size)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        runs[name](x)  # connections are made
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(seconds(runs[name], x))
    return times


def played() -> dict[str, Any]:
    """By size and algorithm for as many ranks: exact or not, and seconds."""
    every: dict[str, Any] = {}
    group = dist.group.WORLD
    assert group is not None
    runs: dict[str, Run] = {"library": dist.all_reduce}
    for name, algorithm in algorithms_for(dist.get_world_size()).items():
        runs[name] = lambda x, a=algorithm: played_collective.all_reduce(x, a, group)  # type: ignore[misc]
    for size_bytes in PLAYED_BYTES:
        size = size_bytes // 4 + 1  # no number of chunks divides it
        right = {name: exact(run, size) for name, run in runs.items()}
        every[str(size_bytes)] = {
            name: {"exact": right[name], "seconds": times}
            for name, times in interleaved(runs, size, PLAYED_ROUNDS).items()
        }
    return every


def slow(rounds: int, size_bytes: int, per_host: int) -> dict[str, Any]:
    ranks = Ranks({REPLICATE: dist.get_world_size()})
    inside, across = ranks.two_level_groups((REPLICATE,), per_host)
    runs: dict[str, Run] = {
        "library": dist.all_reduce,
        "two-level": lambda x: two_level_all_reduce(x, inside, across),
        "library again": dist.all_reduce,
    }
    size = size_bytes // 4
    right = {name: exact(run, size) for name, run in runs.items()}
    times = interleaved(runs, size, rounds)
    return {name: {"exact": right[name], "seconds": times[name]} for name in runs}


def main() -> None:
    what, file, *arguments = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    result = played() if what == "played" else slow(*map(int, arguments))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
