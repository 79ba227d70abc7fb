"""A gated MLP in chunks of tokens, beside at once and torch's checkpoint of it: memory and time.

    python -m benchmarks.mlp_chunks [--rounds 20] [--json]

16,384 tokens of width 256 through 2,048, float32, forward and backward, on all cores. Peaks are
what a process of its own grows by at most, whose allocator gives back what is freed; beside them
stands what the rule has of chunks (`autopar.rules.feed_forward`), with the result and the gradients
of tokens and matrices. In a round
each takes a turn, at once twice, and who begins changes; times are CPU seconds, a ratio is the
median over rounds of one by at once in the same round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.nouns.graph import Op, Tensor
from autopar.rules.extents import ONE_DEVICE, WHOLE_OP
from autopar.rules.feed_forwards import KIND
from autopar.rules.gates import Step
from autopar.rules.held_bytes import workspace_back_bytes
from autopar.rules.registry import bind
from benchmarks.figures import Target, show
from benchmarks.loss_head import ratio, resident, rounds_of, threads

TOKENS, WIDTH, INNER = 16_384, 256, 2048
PLAIN, AGAIN, KEPT = "at once", "at once again", "checkpoint"
CHUNKS = (1, 4, 16)
LEAN = 16
"""The number of chunks that the targets are about."""
MEMORY, TIME, OFF = 0.35, 1.35, 0.15
"""Peak and time over those at once, and how far the rule may be from the measured peak: one forward
more of two products of three is 2/9 of the products; a matrix's gradients are read and written once
a chunk."""
MIB = 1 << 20


def predicted_bytes(chunks: int) -> int:
    """That a backward in chunks holds: what the op works with, the gradients, and the result."""
    held = {"x": (TOKENS, WIDTH), "gate": (INNER, WIDTH), "up": (INNER, WIDTH)}
    held |= {"down": (WIDTH, INNER)}
    made: dict[str, Tensor] = {
        n: Tensor(n, shape, "float32", differentiable=True) for n, shape in held.items()
    }
    made["out"] = Tensor("out", (TOKENS, WIDTH), "float32", differentiable=True)
    gate: tuple[Step, ...] = (("silu", (0,), {}), ("mul", (2, 1), {}))
    attrs = {"ups": 2, "biases": (), "gate": gate, "transposed": False, "chunks": chunks}
    bound = bind(Op(KIND, tuple(held), ("out",), attrs), made)
    whole = sum(made[name].size_bytes for name in (*held, "out"))
    return workspace_back_bytes(bound, WHOLE_OP, ONE_DEVICE) + whole


def steps() -> Callable[[str], None]:
    """What runs a step of one of the names, or of a number of chunks; of none it frees what was
    made."""
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    from autopar.runtime.pytorch.feed_forward import feed_forward

    torch.set_num_threads(threads())
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=draw).requires_grad_()
    gate, up = (torch.randn(INNER, WIDTH, generator=draw).requires_grad_() for _ in range(2))
    down = torch.randn(WIDTH, INNER, generator=draw).requires_grad_()
    coming = torch.randn(TOKENS, WIDTH, generator=draw)

    def between(g: Any, h: Any) -> Any:
        return F.silu(g) * h

    def whole(x: Any) -> Any:
        return F.linear(between(F.linear(x, gate), F.linear(x, up)), down)

    def step(name: str) -> None:
        x.grad = gate.grad = up.grad = down.grad = None
        if not name:
            return
        if name == KEPT:
            out = checkpoint(whole, x, use_reentrant=False)
        elif name in (PLAIN, AGAIN):
            out = whole(x)
        else:
            out = feed_forward(x, (gate, up), down, gate=between, chunks=int(name))
        torch.autograd.backward(out, coming)

    return step


def peak_mib(name: str) -> float:
    """That a process grows by."""
    command = [sys.executable, "-m", "benchmarks.mlp_chunks", "--peak", name]
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=given)
    return float(ran.stdout)


def own_peak(name: str) -> None:
    step = steps()
    step("64")  # the library's buffers
    step("")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    step(name)
    print((resident("VmHWM") - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.peak:
        own_peak(given.peak)
        return
    names = [PLAIN, AGAIN, KEPT, *map(str, CHUNKS)]
    peaks = {name: peak_mib(name) for name in names if name != AGAIN}
    spent = rounds_of(steps(), names, given.rounds)
    times = {name: ratio(spent, name, PLAIN) for name in names}
    rule = {str(n): predicted_bytes(n) / MIB for n in CHUNKS}
    rows = [
        {
            "mlp": name if name in (PLAIN, AGAIN, KEPT) else f"{name} chunks",
            "peak MiB": peaks.get(name),
            "over at once": peaks[name] / peaks[PLAIN] if name in peaks else None,
            "by the rule MiB": rule.get(name),
            "CPU time over at once": times[name],
        }
        for name in names
    ]
    lean = str(LEAN)
    off = max(abs(rule[str(n)] / peaks[str(n)] - 1) for n in CHUNKS)
    met = [
        Target(f"peak of {LEAN} chunks over at once", peaks[lean] / peaks[PLAIN], MEMORY),
        Target(f"CPU time of {LEAN} chunks over at once", times[lean], TIME),
        Target("peak by the rule over measured, worst less 1", off, OFF),
    ]
    show(rows, met, given.json)
    sys.exit(0 if all(target.met for target in met) else 1)


if __name__ == "__main__":
    main()
