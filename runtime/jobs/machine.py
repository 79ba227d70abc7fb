"""Whether this machine can run a plan at all, said before any process starts."""

from __future__ import annotations

import os
import re
from pathlib import Path

from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan

DEVICES = ("auto", "cpu", "cuda")

PROCESS_BYTES = 256 << 20
"""A Python process with its framework and nothing else; measured with torch 2.13 on Linux."""

MOST_PER_CORE = 8
"""Processes that take turns on a core; more of them wait for one another longer than they work."""

_MEMORY = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")


class TooSmall(UserError):
    """A plan for more, or for other devices than this machine has."""


def check_device(device: str) -> None:
    """Raises `UserError` for a ``device`` that there is not."""
    if device not in DEVICES:
        raise UserError(
            f"device {device}: choose {', '.join(DEVICES[:-1])} or {DEVICES[-1]}; auto takes the "
            "accelerators that there are, TPUs too for a JAX plan"
        )


def check_machine(plan: Plan, folder: str | Path, device: str) -> None:
    """Raises `TooSmall` where this machine cannot hold the ``plan`` in ``folder``, or where it is
    for GPUs that are not here and nobody asked for CPUs (``device`` is ``auto``)."""
    kind = ""
    if (Path(folder) / plan_folder.CLUSTER).exists():
        kind = plan_folder.read_cluster(folder).device_at(0).kind
    cores = os.cpu_count() or 1
    check(plan, kind, device, accelerators(), available_bytes(), cores)


def check(plan: Plan, kind: str, device: str, present: int, free_bytes: int, cores: int) -> None:
    """`check_machine` of given figures.

    kind:       of the plan's devices; empty where it is not known.
    present:    accelerators of this machine.
    cores:      of its CPU.
    free_bytes: memory that its CPU processes can have; 0 where it is not known.
    """
    ranks = plan.device_count
    if device != "cpu" and present >= ranks:
        return  # the program runs on accelerators
    again = (
        f"Plan for this machine with `autopar plan {plan.workload.rpartition('/')[2]} "
        "--cluster local`"
    )
    if device == "auto" and kind not in ("", "cpu"):
        raise TooSmall(
            f"the plan is for {ranks} {kind.upper()}s, this machine has {present}. {again}, or run "
            "the plan on CPU processes with --device cpu"
        )
    memory = plan.prediction.memory_bytes
    processes = 1 if plan.framework == "jax" else ranks
    if processes > MOST_PER_CORE * cores:
        raise TooSmall(
            f"the plan is for {ranks} devices, a process each; this machine has {cores} cores, on "
            f"which {MOST_PER_CORE * cores} processes can take turns at most. {again}"
        )
    # What libraries and allocators add on the plan's own devices is not what they add here.
    needed = ranks * (memory.total - memory.buffers) + processes * PROCESS_BYTES
    if free_bytes and needed > free_bytes:
        raise TooSmall(
            f"the plan is for {ranks} devices; on this machine's CPU its ranks need at least "
            f"{_gib(needed)} together ({_gib(memory.total - memory.buffers)} of parameters, "
            f"gradients, optimizer state and activations each, {_gib(PROCESS_BYTES)} for each of "
            f"{processes} processes), and {_gib(free_bytes)} are free. {again}"
        )


def accelerators() -> int:
    """GPUs and TPUs that the system shows, without asking their libraries."""
    devices = Path("/dev")
    return sum(1 for file in devices.glob("*") if re.fullmatch(r"(nvidia|accel)\d+", file.name))


def available_bytes() -> int:
    """Memory that new processes can have without swapping, within the container's limit."""
    if not _MEMORY.is_file():
        return 0
    line = re.search(r"^MemAvailable:\s+(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
    free = int(line.group(1)) * 1024 if line else 0
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
    if limit == "max" or not _USED.is_file():
        return free
    return min(free, int(limit) - int(_USED.read_text()))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"
