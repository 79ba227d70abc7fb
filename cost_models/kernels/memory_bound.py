"""Norms, rotary embeddings, losses of given logits: passes of each way over its elements.

    bytes = elements (narrow b + wide 4)

for `narrow` passes in the tensor's own width of b bytes and `wide` ones in float32. A pass is one
read or write of every element that goes to device memory: a row that is read again behind a
reduction counts again unless it stays in registers. Counted from what each way does, not fitted;
backward adds a gradient into one that is there (two reads, a write) where a graph is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.kernels.streams import Constants, Traffic, stream_s
from autopar.nouns.cluster import Device

HELD = 4096
"""Elements of a row that a block of threads keeps in registers between two readings."""
ACCUMULATED = 3.0
"""Passes of a gradient that is added to the leaf's: two reads and a write."""


@dataclass(frozen=True)
class Passes:
    """Passes over the elements of one way through a kernel."""

    narrow: float
    wide: float = 0.0
    launches: int = 1
    again: float = 0.0
    """Narrow passes that only rows longer than a block holds (`HELD`) need."""

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.narrow + other.narrow,
            self.wide + other.wide,
            self.launches + other.launches,
            self.again + other.again,
        )


@dataclass(frozen=True)
class MemoryBound:
    """Both ways of one kernel, and whether Python launches it from an autograd function."""

    forward: Passes
    backward: Passes
    python: bool = False
    reads_back: bool = False
    """The host waits for a number before it launches the rest."""


def memory_bound_s(
    device: Device,
    kernel: MemoryBound,
    elements: float,
    element_bytes: float,
    c: Constants,
    direction: str = "full",
    row: int = 0,
) -> float:
    """Seconds of `fwd`, `bwd` or `full`, both; of rows of `row` elements.

    Autograd starts a backward on a thread of its own, which small tensors wait for; a forward alone
    is issued while the device still works.
    """
    ways = {"fwd": kernel.forward, "bwd": kernel.backward}
    passes = ways.get(direction) or kernel.forward + kernel.backward
    narrow = passes.narrow + (passes.again if row > HELD else 0.0)
    moved = elements * (narrow * element_bytes + passes.wide * 4.0)
    host_s = 0.0
    if direction != "fwd" and kernel.python:
        host_s = c["host_backward_s"] + (c["host_forward_s"] if direction == "full" else 0.0)
    elif direction != "fwd":
        host_s = c["host_launch_s"] * passes.launches
    waiting_s = c["read_back_s"] if kernel.reads_back and direction != "bwd" else 0.0
    return waiting_s + stream_s(device, Traffic(moved, passes.launches, host_s), c)


_EAGER_NORM = MemoryBound(Passes(5, 8, 7), Passes(8, 22, 14))
KERNELS: dict[tuple[str, str], MemoryBound] = {
    ("rms_norm", "fused"): MemoryBound(Passes(2), Passes(3 + ACCUMULATED, 0, 3), python=True),
    ("rms_norm", "eager"): _EAGER_NORM,
    ("rms_norm", "library"): MemoryBound(Passes(2, again=1), Passes(10 + ACCUMULATED, 0, 3)),
    ("layer_norm", "fused"): MemoryBound(Passes(2), Passes(3 + ACCUMULATED, 0, 3), python=True),
    ("layer_norm", "library"): MemoryBound(Passes(2, again=1), Passes(4 + ACCUMULATED, 0, 3)),
    ("fused_add_rms_norm", "fused"): MemoryBound(
        Passes(4), Passes(5 + 2 * ACCUMULATED, 0, 4), True
    ),
    ("fused_add_rms_norm", "unfused"): MemoryBound(Passes(5, 0, 2), Passes(13, 0, 5), True),
    ("fused_add_rms_norm", "eager"): MemoryBound(Passes(8, 8, 8), Passes(14, 22, 15)),
    ("rope", "fused"): MemoryBound(Passes(2), Passes(2, 0, 2), python=True),
    ("rope", "eager"): MemoryBound(Passes(19, 0, 10), Passes(22, 0, 14)),
    ("cross_entropy", "fused"): MemoryBound(Passes(3), Passes(4, 0, 3), True, reads_back=True),
    ("cross_entropy", "library"): MemoryBound(Passes(4, 0, 2), Passes(5, 0, 3)),
    ("softmax", "fused"): MemoryBound(Passes(2), Passes(3 + ACCUMULATED, 0, 3), python=True),
    ("softmax", "library"): MemoryBound(Passes(2, again=2), Passes(3 + ACCUMULATED, again=2)),
    ("kl_div", "fused"): MemoryBound(Passes(2), Passes(4, 0, 3), python=True),
    ("kl_div", "library"): MemoryBound(Passes(4, 0, 2), Passes(5, 0, 3)),
    ("jsd", "fused"): MemoryBound(Passes(3), Passes(4, 0, 3), python=True),
    ("jsd", "library"): MemoryBound(Passes(20, 0, 10), Passes(30, 0, 15)),
    ("gate", "fused"): MemoryBound(Passes(3), Passes(5, 0, 2), python=True),
    ("gate", "library"): MemoryBound(Passes(5, 0, 2), Passes(9, 0, 4)),
    ("megatron_cross_entropy", "fused"): MemoryBound(Passes(3), Passes(5, 0, 3), True, True),
    ("megatron_cross_entropy", "compiled"): MemoryBound(Passes(1, 7, 6), Passes(1, 4, 3)),
    ("megatron_cross_entropy", "eager"): MemoryBound(Passes(1, 9, 9), Passes(1, 3, 3)),
}
