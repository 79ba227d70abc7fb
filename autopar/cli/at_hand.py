"""The CPU cores at hand, measured in some seconds before the first plan for them.

The figures of a CPU core in the catalogue are assumed, and may be off by two. Where a plan is for
CPU processes of this machine, a quick profile (`autopar.runtime.profile.quick`, `jax.quick` for a
model of JAX) takes their place. It is kept in the cache folder, by CPU, cores, library versions and
number of processes, so that every plan after the first has the same input; a plan's fingerprint
names it, as any profile. What was measured beside other work serves the plans of an hour, which say
so: a machine that is always busy is not measured before each of them, and one that comes to rest
soon is.
"""

from __future__ import annotations

import hashlib
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from autopar.cli.profile import driver, libraries, measure, processor
from autopar.cost_models.profile_db import Machine, ProfileDb
from autopar.cost_models.profile_file import ProfileError
from autopar.nouns.cluster import Cluster
from autopar.nouns.workload import Framework
from autopar.runtime.jobs.machine import MOST_PER_CORE

SWITCH = "AUTOPAR_MEASURE"
"""Environment variable: 0 leaves the machine unmeasured and the assumed figures in place."""
WORKERS: Mapping[Framework, str] = MappingProxyType(
    {"torch": "autopar.runtime.profile.quick", "jax": "autopar.runtime.profile.jax.quick"}
)
QUIET_CORES = 0.4
"""What this process and the system need themselves."""
BUSY_FOR_S = 3600
"""How long figures that were measured beside other work serve. Chosen: a run that keeps the cores
busy takes hours, a compilation minutes."""
_STAT = Path("/proc/stat")
KERNELS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
"""Environment variables that choose other kernels, and so other times."""


def quick_profile(
    cluster: Cluster, progress: Callable[[str], None], framework: Framework = "torch"
) -> Path | None:
    """The profile of the cores that ``cluster`` is for, measured where there is none yet, by
    programs of ``framework``.

    None where it is not for CPU processes of this machine, measuring is switched off, or the
    measurement failed: then assumed figures are used, and progress says why.
    """
    if os.environ.get(SWITCH) == "0" or not _is_here(cluster):
        return None
    machine = Machine(cluster.device.name, driver(), libraries(framework) or "", processor())
    kept = _folder() / f"cpu-{_name(machine, cluster.device_count)}.db"
    if kept.is_file():
        return kept
    busy = kept.with_suffix(".busy.db")
    age_s = _age_s(busy)
    if age_s is not None:
        progress(
            f"prices by what was measured beside other work {age_s / 60:.0f} min ago; measures "
            f"again in {(BUSY_FOR_S - age_s) / 60:.0f} min, or at once if {busy} is deleted"
        )
        return busy
    progress(
        f"measuring {cluster.device_count} processes on this machine for some seconds, once; "
        f"{SWITCH}=0 takes assumed figures instead"
    )
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            made = Path(scratch) / kept.name
            before = _busy_s()
            with ProfileDb(made) as db:
                failed = measure(
                    db, machine, cluster, None, lambda _: None, framework, WORKERS[framework]
                )
            others = _others_cores(before)
            if failed:
                progress(f"this machine was not measured, its figures are assumed: {failed}")
                return None
            if others > QUIET_CORES:
                kept = busy
            made.replace(kept)
    except (OSError, ProfileError) as error:
        progress(f"this machine was not measured, its figures are assumed: {error}")
        return None
    if others > QUIET_CORES:
        progress(
            f"measured while other work took {others:.1f} cores: these times hold for a machine "
            f"that is as busy, and serve the plans of the next {BUSY_FOR_S // 60} min; delete "
            f"{kept} to measure again before"
        )
    else:
        progress(f"measured, and kept in {kept} for the next plan")
    return kept


def _age_s(busy: Path) -> float | None:
    """Seconds since ``busy`` was measured; None where it is not there or serves no longer."""
    try:
        age_s = time.time() - busy.stat().st_mtime
    except OSError:
        return None
    return age_s if 0 <= age_s < BUSY_FOR_S else None


def _busy_s() -> tuple[float, float, float]:
    """Now, the CPU seconds of all processes, and those of this one's children."""
    ticks = 0
    if _STAT.is_file():
        ticks = sum(map(int, _STAT.read_text().split("\n", 1)[0].split()[1:4]))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), used_s, children.ru_utime + children.ru_stime


def _others_cores(before: tuple[float, float, float]) -> float:
    """Cores that processes other than this one's children kept busy since ``before``."""
    wall_s, total_s, own_s = (b - a for a, b in zip(before, _busy_s(), strict=True))
    return max(0.0, (total_s - own_s) / wall_s) if wall_s > 0 else 0.0


def _is_here(cluster: Cluster) -> bool:
    """CPU processes of one machine, as many as its cores can run side by side."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        {group.device.name for group in cluster.groups} == {"cpu-core"}
        and [level.library for level in cluster.levels] == ["gloo"]
        and cluster.device_count <= MOST_PER_CORE * (cores or 1)
    )


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


def _name(machine: Machine, ranks: int) -> str:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    chosen = [f"{name}={os.environ[name]}" for name in KERNELS if name in os.environ]
    text = "\n".join([machine.id, str(ranks), str(cores), *chosen])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
