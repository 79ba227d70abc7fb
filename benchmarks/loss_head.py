"""The last product and its loss in chunks of rows, beside both at once: memory and time.

    python -m benchmarks.loss_head [--rounds 20] [--sweep 3] [--json]

2,048 rows of width 256 over a vocabulary of 131,072, float32, forward and backward, on all cores.
Peaks are what a process of its own grows by at most. In a round each takes a turn, plain twice, and
who begins changes; times are CPU seconds, and a ratio is the median over rounds of one by plain in
the same round. In a sweep over numbers of chunks, the number that a plan would take under a limit
of memory (the fewest that fit by the rule's bytes) stands beside the fastest whose measured peak
is within it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.nouns.graph import Op, Tensor
from autopar.rules.extents import ONE_DEVICE, WHOLE_OP
from autopar.rules.held_bytes import kept_bytes, workspace_bytes
from autopar.rules.loss_heads import KIND
from autopar.rules.registry import bind
from benchmarks.figures import Target, show

ROWS, WIDTH, VOCABULARY = 2048, 256, 131_072
PLAIN, AGAIN = "plain", "plain again"
LEAN, SWEEP = 8, (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Chunks that are judged beside plain, and those that are swept."""
LIMITS = (0.10, 0.15, 0.20, 0.30, 0.50)
"""Of plain's peak, under which a plan chooses."""
MIB = 1 << 20


def predicted_bytes(chunks: int) -> int:
    """Of what the op keeps and works with."""
    made = (
        Tensor("x", (ROWS, WIDTH), "float32", differentiable=True),
        Tensor("labels", (ROWS,), "int64"),
        Tensor("weight", (VOCABULARY, WIDTH), "float32", "parameter", differentiable=True),
        Tensor("loss", (), "float32", differentiable=True),
    )
    op = Op(KIND, ("x", "labels", "weight"), ("loss",), {"chunks": chunks})
    bound = bind(op, {tensor.name: tensor for tensor in made})
    return sum(kept_bytes(bound)) + workspace_bytes(bound, WHOLE_OP, ONE_DEVICE)


def steps(threads: int) -> Callable[[str], None]:
    """What runs a step of ``plain`` or of a number of chunks."""
    import torch
    import torch.nn.functional as F

    from autopar.runtime.pytorch.loss_head import linear_cross_entropy

    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=draw).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=draw) * 0.02).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=draw)
    F.linear(x[:8], weight[:8])  # the library's buffers

    def step(name: str) -> None:
        x.grad = weight.grad = None
        if name.startswith(PLAIN):
            loss = F.cross_entropy(F.linear(x, weight), labels)
        else:
            loss = linear_cross_entropy(x, weight, labels, count=ROWS, chunks=int(name))
        torch.autograd.backward(loss)

    return step


def peak(name: str) -> float:
    """MiB that a process grows by."""
    command = [sys.executable, "-m", "benchmarks.loss_head", "--peak", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def own_peak(name: str) -> None:
    step = steps(threads())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    step(name)
    print((resident("VmHWM") - before) / 1024)


def resident(what: str) -> int:
    """KiB of this process, now or at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def threads() -> int:
    return len(os.sched_getaffinity(0))


def rounds_of(
    step: Callable[[str], None], names: list[str], rounds: int
) -> Mapping[str, list[float]]:
    """CPU seconds of each in every round."""
    spent = {name: list[float]() for name in names}
    for number in range(rounds):
        turn = names[number % len(names) :] + names[: number % len(names)]
        for name in turn:
            start = time.process_time()
            step(name)
            spent[name].append(time.process_time() - start)
    return spent


def ratio(spent: Mapping[str, list[float]], name: str, plain: str = PLAIN) -> float:
    """To ``plain``."""
    return statistics.median(a / b for a, b in zip(spent[name], spent[plain], strict=True))


def chosen(limit_mib: float) -> int | None:
    """The fewest chunks whose predicted bytes are within a limit."""
    fitting = (n for n in range(1, ROWS + 1) if predicted_bytes(n) <= limit_mib * MIB)
    return next(fitting, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sweep", type=int, default=3, help="rounds over all numbers of chunks")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.peak:
        own_peak(options.peak)
        return
    whole = peak(PLAIN)
    limits = {share: chosen(share * whole) for share in LIMITS}
    counts = sorted({*SWEEP, *(n for n in limits.values() if n)})
    peaks = {n: peak(str(n)) for n in counts}
    step = steps(threads())
    swept = rounds_of(step, [PLAIN, *map(str, counts)], options.sweep)
    each = {n: ratio(swept, str(n)) for n in counts}
    beside = rounds_of(step, [PLAIN, AGAIN, str(LEAN)], options.rounds)
    rows: list[dict[str, Any]] = [
        {"chunks": PLAIN, "peak_mib": whole, "of_plain": 1.0, "time": 1.0, "predicted_mib": None}
    ]
    rows += [
        {
            "chunks": str(n),
            "peak_mib": peaks[n],
            "of_plain": peaks[n] / whole,
            "time": each[n],
            "predicted_mib": predicted_bytes(n) / MIB,
        }
        for n in counts
    ]
    targets = [
        Target(f"peak of {LEAN} chunks, of plain's", peaks[LEAN] / whole, 0.10),
        Target(f"time of {LEAN} chunks, by plain's", ratio(beside, str(LEAN)), 1.06),
    ]
    for share, n in limits.items():
        within = [m for m in counts if peaks[m] <= share * whole]
        if n is not None and within:
            best = min(within, key=each.__getitem__)
            name = f"{n} chunks chosen within {share:.2f} of plain's peak, by the best, {best}"
            targets.append(Target(name, each[n] / each[best], 1.03))
    again = ratio(beside, AGAIN)
    rows.append(
        {"chunks": AGAIN, "peak_mib": None, "of_plain": None, "time": again, "predicted_mib": None}
    )
    show(rows, targets, options.json)
    raise SystemExit(any(not target.met for target in targets))


if __name__ == "__main__":
    main()
