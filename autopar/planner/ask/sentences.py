"""Layouts and memory in words, for errors, notes and tables."""

from __future__ import annotations

from autopar.nouns.offload import OFFLOAD
from autopar.nouns.prediction import Memory
from autopar.nouns.recompute import POLICIES
from autopar.planner.ask.candidates import degrees_text
from autopar.planner.ask.question import Decided


def short_text(memory: Memory) -> str:
    """What is too much, of the device's memory or of its host's."""
    if memory.total > memory.limit:
        return size_text(memory.total - memory.limit)
    return f"{size_text(memory.host - memory.host_limit)} of host memory"


def size_text(size_bytes: int) -> str:
    """``12.3 GiB``; below one GiB in MiB."""
    gib = size_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"


def layout_text(decided: Decided) -> str:
    """Every choice of a layout in one line."""
    layout = decided.layout
    chosen = {stage.recompute for stage in decided.stages} or {layout.recompute}
    ordered = sorted(chosen, key=lambda one: (POLICIES.index(one.policy), str(one)))
    recompute = " and ".join(map(str, ordered))
    return (
        f"{degrees_text(decided.spread.mesh, ', ')}, "
        + (f"pp={decided.pp}, {decided.schedule}, " if decided.pp > 1 else "")
        + f"ZeRO {layout.zero}, {decided.candidate.microbatches} microbatches, "
        f"recompute={recompute}"
        + ("" if layout.offload == OFFLOAD[0] else f", offload={layout.offload}")
    )
