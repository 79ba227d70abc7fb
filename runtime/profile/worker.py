"""What each process of `autopar profile` runs: every measurement is one JSON line of rank 0.

    python -m autopar.runtime.profile.worker 'file of what is known already'

All processes run the same call at the same time, since they share the machine's memory and, on a
CPU, its caches. Which of them is slowest changes within a step, so an op takes the mean over ranks;
that the others wait where they meet is measured apart, and a collective is what it adds to the
slowest. A figure is the median over repeats.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autopar.runtime.profile.bench import Bench
from autopar.runtime.profile.cases import (
    CHAIN_BYTES,
    UPDATE_MOVES,
    UPDATED,
    WAYS,
    Case,
    cases,
)
from autopar.runtime.profile.collectives import Overlap, exchanges, units
from autopar.runtime.profile.ops import Chain, Update
from autopar.runtime.profile.process import measure_process

SEGMENTS_S = (5e-3, 20e-3, 80e-3)
"""Compute between two meetings of ranks, from a layer's part to several layers."""
PAUSE_S = 1.5e-3
"""Compute between collectives: about what lies between two of a tensor-parallel layer."""


def measure_ops(bench: Bench) -> None:
    """Forward and backward of every case; float32 whole, other dtypes by one kind of each class."""
    scale = 8 if bench.device.type == "cuda" else 1
    half = torch.bfloat16
    for dtype in (torch.float32, half):
        name = {torch.float32: "fp32", half: "bf16"}[dtype]
        for case in cases(scale):
            if dtype is half and case.kind not in ("linear", "attention", "add", "layer_norm"):
                continue
            measure_case(bench, case, dtype, name)


def measure_case(
    bench: Bench,
    case: Case,
    dtype: torch.dtype,
    name: str,
    chain_bytes: float = CHAIN_BYTES,
) -> None:
    """Forward and backward of one case; ``name`` is the catalogue's of ``dtype``."""
    work = case.work(str(dtype).removeprefix("torch."))
    keys = [f"{work.cost} {work.kind} {way} {name} {case.name}" for way in WAYS]
    forward = ("op", keys[0], work.forward_bytes, work.forward_flops)
    backward = ("op", keys[1], work.backward_bytes, work.backward_flops)
    if not bench.wants(*forward) and not bench.wants(*backward):
        return
    chain = Chain(case, dtype, bench.device, chain_bytes)
    chain.forward()
    chain.backward()
    seconds = bench.mean(chain.clear, chain.forward, chain.backward)
    bench.write(*forward, [t / chain.calls for t in seconds[1]])
    bench.write(*backward, [t / chain.calls for t in seconds[2]])


def measure_updates(bench: Bench, sizes: Sequence[int] = (1 << 18, 1 << 21, 1 << 23)) -> None:
    """The optimizer's step by the bytes that it reads and writes; ``sizes`` in elements."""
    for elements in sizes:
        moved = 4.0 * UPDATE_MOVES * elements
        key = f"update {UPDATED} forward fp32 {elements}"
        if bench.wants("op", key, moved, 0.0):
            update = Update(elements, bench.device)
            update.step()
            bench.write("op", key, moved, 0.0, bench.mean(update.step)[0])


def measure_collectives(
    bench: Bench, kinds: Sequence[str] | None = None, sizes: Sequence[int] | None = None
) -> None:
    """Each collective's time is what it adds to the compute that it follows.

    ``kinds`` and ``sizes`` (bytes) are those to measure; None: all.
    """
    x = torch.rand(256, 256, device=bench.device)
    weight = torch.rand(768, 256, device=bench.device)

    def layer() -> None:
        torch.nn.functional.silu(torch.nn.functional.linear(x, weight))

    layers = _calls_of(layer, PAUSE_S, bench)

    def pause() -> None:
        for _ in range(layers):
            layer()

    for exchange in exchanges(bench.world, bench.device):
        if not bench.wants("collective", exchange.key, exchange.size_bytes, 0.0):
            continue
        if exchange.kind not in (kinds or [exchange.kind]):
            continue
        if exchange.size_bytes not in (sizes or [exchange.size_bytes]):
            continue
        rounds = 4 if exchange.size_bytes < 1 << 20 else 1

        def alone(rounds: int = rounds) -> None:
            for _ in range(rounds):
                pause()

        def beside(rounds: int = rounds, call: Callable[[], Any] = exchange.call) -> None:
            for _ in range(rounds):
                pause()
                call()

        without, together = bench.slowest(alone, beside)
        added = [(b - a) / rounds for a, b in zip(without, together, strict=True)]
        bench.write("collective", exchange.key, exchange.size_bytes, 0.0, added)


def _calls_of(call: Callable[[], Any], seconds: float, bench: Bench) -> int:
    """How many calls take ``seconds``, the same on every rank."""
    by_rank = bench.mean(lambda: [call() for _ in range(8)])[0]
    return max(1, round(8 * seconds / sorted(by_rank)[len(by_rank) // 2]))


def measure_units(bench: Bench) -> None:
    """What DDP and FSDP2 take to move the parameters of a unit and their gradients."""
    for group, size_bytes, make in units(bench.world, bench.device):
        keys = {kind: f"{kind} {group}" for kind in ("unit_gather", "unit_reduce", "bucket_reduce")}
        if not any(bench.wants("collective", key, size_bytes, 0.0) for key in keys.values()):
            continue
        unit = make()
        calls = (unit.plain, unit.gather, unit.reduce, unit.sharded, unit.replicated)
        columns = bench.slowest(*calls, settles=True)
        rows = list(zip(*columns, strict=True))
        added = {
            "unit_gather": [gather for _, gather, *_ in rows],
            # Noise may hide a difference, but a reduction never takes less than the plain one, and
            # FSDP2's never moves less than its gather.
            "unit_reduce": [max(gather, s - gather - plain) for plain, gather, _, s, _ in rows],
            "bucket_reduce": [max(reduce, r - plain) for plain, _, reduce, _, r in rows],
        }
        for kind, times in added.items():
            bench.write("collective", keys[kind], size_bytes, 0.0, times)


def measure_waiting(bench: Bench, segments_s: Sequence[float] = SEGMENTS_S) -> None:
    """How far the slowest rank falls behind while all compute; where they meet, the others wait."""
    x = torch.rand(256, 256, device=bench.device)
    weight = torch.rand(768, 256, device=bench.device)
    stream = torch.rand(2048, 256, device=bench.device)

    def layer() -> None:
        torch.nn.functional.silu(torch.nn.functional.linear(x, weight))
        torch.mul(stream, 0.5)

    for seconds in segments_s if bench.world > 1 else ():
        key = f"{1e3 * seconds:g} ms"
        if bench.wants("waiting", key, 0.0, 0.0):
            calls = _calls_of(layer, seconds, bench)
            bench.write("waiting", key, 0.0, 0.0, bench.waited(partial(_repeat, layer, calls)))


def _repeat(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


def measure_overlap(bench: Bench) -> None:
    """Compute alone, a collective alone, and both at once."""
    if not bench.wants("overlap", "both", 0.0, 0.0):
        return
    overlap = Overlap(bench.world, bench.device)
    names = ("compute", "collective", "both")
    times = bench.slowest(overlap.compute, overlap.collective, overlap.both)
    for name, seconds in zip(names, times, strict=True):
        bench.write("overlap", name, 0.0, 0.0, seconds)


def begun() -> set[tuple[Any, ...]]:
    """The rows that are known already, for a process that is ready to measure."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    return {tuple(row) for row in json.loads(Path(sys.argv[1]).read_text())}


def end() -> NoReturn:
    """As a training process ends: without waiting for gloo's threads."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    bench = Bench(begun())
    measure_process(bench)
    measure_ops(bench)
    measure_updates(bench)
    measure_collectives(bench)
    measure_units(bench)
    measure_waiting(bench)
    measure_overlap(bench)
    end()


if __name__ == "__main__":
    main()
