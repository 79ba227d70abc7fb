"""Ring attention beside torch's own context parallelism, both in zigzag order.

    python -m benchmarks.ring_attention [--rounds 20] [--lengths 2048 4096 8192] [--json]

Forward and backward of a causal attention (b 1, h 8, d 64, float32) on four gloo processes of one
thread. The reference is torch's templates of ring attention with the CPU's flash kernel, called
without DTensor's dispatch, which takes nothing from them: with its default, an all-gather of keys
and values, and with its ring. In a round each takes a turn, ours twice, and who begins changes. A
ratio is the median over rounds of what ours takes by what the other takes; the ratio of ours to
ours says how much of that is noise.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show

PROCESSES, HEADS, WIDTH = 4, 8, 64
LIMIT = 1.0
APART = 1e-5
"""Relative, of results and gradients in float32."""
OURS, AGAIN, GATHERED, RING = "ours", "ours again", "torch, gathered", "torch, ring"
Attention = Callable[..., Any]


def by_torch(gathers: bool) -> Attention:
    import torch
    import torch.distributed as dist

    from autopar.torch_private.distributed import context_parallel
    from autopar.torch_private.ops import flash_cpu, flash_cpu_backward

    group = dist.group.WORLD

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            there, _ = context_parallel(gathers)
            out, lse = there(group, 2, flash_cpu, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            _, back = context_parallel(gathers)
            q, k, v, out, lse = ctx.saved_tensors
            where = (group, 2, flash_cpu_backward, grad, "grad_out")
            return back(*where, q, k, v, out, lse, is_causal=True, dropout_p=0.0)

    attend: Attention = Ring.apply
    return attend


def by_us() -> Attention:
    from autopar.runtime.pytorch.ring_attention import ring_attention

    return lambda q, k, v: ring_attention(q, k, v, causal=True, ring="cp", order="zigzag")


def timed(attend: Attention, operands: list[Any], grad: Any) -> tuple[float, list[Any]]:
    """Seconds until all ranks are through, and the result and gradients."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    out = attend(*operands)
    grads = torch.autograd.grad(out, operands, grad)
    dist.barrier()
    return time.perf_counter() - start, [out.detach(), *grads]


def of_length(length: int, rounds: int, sides: Mapping[str, Attention]) -> dict[str, Any]:
    import torch

    shape = (1, HEADS, length // PROCESSES, WIDTH)
    operands = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(1 + rounds):  # the first is not counted
        results = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds, results[name] = timed(sides[name], operands, grad)
            times[name].append(seconds)
        if turn == 0:
            _check_same(results)
    counted = {name: seconds[1:] for name, seconds in times.items()}
    row: dict[str, Any] = {"length": length}
    row |= {f"{name}, s": statistics.median(seconds) for name, seconds in counted.items()}
    for name in (AGAIN, GATHERED, RING):
        ratios = [a / b for a, b in zip(counted[OURS], counted[name], strict=True)]
        row[f"ours / {name}"] = statistics.median(ratios)
        quarters = statistics.quantiles(ratios, n=4)
        row[f"ours / {name}, quarters"] = f"{quarters[0]:.3f} to {quarters[2]:.3f}"
    return row


def _check_same(results: Mapping[str, list[Any]]) -> None:
    for name, each in results.items():
        for got, right in zip(each, results[OURS], strict=True):
            apart = float((got - right).norm() / right.norm())
            if apart > APART:
                raise SystemExit(f"{name} and ours are {apart:.2g} apart")


def measure(folder: Path, rounds: int, lengths: list[int]) -> None:
    """The worker; rank 0 leaves ``rows.json``."""
    import torch
    import torch.distributed as dist

    from autopar.runtime.pytorch.ranks import Ranks, using

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    with using(Ranks({"cp": PROCESSES})):
        sides = {OURS: by_us(), GATHERED: by_torch(True), AGAIN: by_us(), RING: by_torch(False)}
        rows = [of_length(length, rounds, sides) for length in lengths]
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(Path(options.worker), options.rounds, options.lengths)
        return
    with tempfile.TemporaryDirectory() as scratch:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        run += [f"--nproc-per-node={PROCESSES}", "-m", "benchmarks.ring_attention"]
        run += [f"--rounds={options.rounds}", "--worker", scratch]
        run += ["--lengths", *map(str, options.lengths)]
        subprocess.run(run, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = json.loads((Path(scratch) / "rows.json").read_text())
    targets = [
        Target(f"{row['length']}: ours / {name}", row[f"ours / {name}"], LIMIT)
        for row in rows
        for name in (GATHERED, RING)
    ]
    show(rows, targets, options.json)


if __name__ == "__main__":
    main()
