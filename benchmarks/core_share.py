"""A fixed share of one core for each process, as each device has a speed of its own.

    python -m benchmarks.core_share FOLDER MODULE ARGUMENT...

runs a module as the rank that its environment names, in that rank's control group under FOLDER.
Where more processes than cores train together, one that waits leaves its core to the others: they
run faster than any measurement of all at once, by an amount that depends on the layout. Under a
quota (Linux control groups, version 1 or 2) and on one core a process has the same speed
throughout. `shares` makes the groups while its context lasts; needs root.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 4_000
"""Of a quota: short beside an operation of a step, long beside a switch of processes."""
_SECOND, _FIRST = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")


def missing() -> str:
    """What this machine lacks; empty where nothing."""
    try:
        with shares(1):
            return ""
    except OSError as error:
        return f"control groups with a CPU quota: {error}"


@contextmanager
def shares(processes: int) -> Iterator[str]:
    """The folder of ``processes`` groups that share the cores evenly, none more than one.

    As processes with other mounts see it, which `ip netns exec` makes. Raises `OSError`.
    """
    first = (_FIRST / "cpu.shares").exists()
    folder = (_FIRST if first else _SECOND) / f"shares{os.getpid()}"
    share = min(1.0, len(os.sched_getaffinity(0)) / processes)
    quota_us = round(PERIOD_US * share)
    groups = [folder / str(rank) for rank in range(processes)]
    try:
        if not first:
            (_SECOND / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
        if not first:
            (folder / "cgroup.subtree_control").write_text("+cpu")
        for group in groups:
            group.mkdir()
            if first:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        yield f"/proc/{os.getpid()}/root{folder}"
    finally:
        for group in (*groups, folder):
            if group.exists():
                group.rmdir()


def core_of(rank: int, processes: int) -> int:
    """Neighbours share a core where there are fewer cores than processes."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank * len(cores) // processes if processes > len(cores) else rank]


def main() -> None:
    folder, module, *arguments = sys.argv[1:]
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (Path(folder) / str(rank) / "cgroup.procs").write_text(str(os.getpid()))
    os.sched_setaffinity(0, {core_of(rank, processes)})
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
