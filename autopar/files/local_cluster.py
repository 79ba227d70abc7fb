"""The machine at hand as a cluster: its GPUs, or the cores of its CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace

from autopar.cost_models.catalogue import UnknownDevice, find_device
from autopar.nouns.cluster import Cluster, Device, DeviceGroup
from autopar.nouns.level import Level


def local_cluster() -> Cluster:
    """This machine: its NVIDIA GPUs where `nvidia-smi` knows some, else its CPU cores.

    Figures are the catalogue's or assumed, until `autopar profile` has measured them.
    """
    gpus = _local_gpus()
    if gpus:
        level = Level("local gpus", len(gpus), 200e9 if len(gpus) > 1 else 1e12, 3e-6)
        return Cluster("local", (DeviceGroup(gpus[0], len(gpus)),), (level,))
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    core = find_device("cpu-core")
    memory_bytes = max(1 << 24, _machine_memory_bytes(count * core.memory_bytes) // count)
    core = replace(core, memory_bytes=memory_bytes)
    # Assumed: gloo over the loopback moves about 1 GB/s per process, with 100 us a step.
    level = Level("loopback", count, 1e9, 1e-4, library="gloo")
    return Cluster("local", (DeviceGroup(core, count),), (level,))


def _machine_memory_bytes(default: int) -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return default


def gpu_driver() -> str:
    """'NVIDIA H100 80GB HBM3, 550.54'; empty without a GPU."""
    return next(iter(_ask_gpus("name,driver_version")), "")


def _ask_gpus(what: str) -> list[str]:
    """One line for each NVIDIA GPU; empty where `nvidia-smi` is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _local_gpus() -> list[Device]:
    """NVIDIA GPUs that are in the catalogue."""
    names = [line.removeprefix("NVIDIA ") for line in _ask_gpus("name")]
    devices = [_catalogue_gpu(name) for name in names if name]
    return [device for device in devices if device is not None]


def _catalogue_gpu(driver_name: str) -> Device | None:
    """'H100 80GB HBM3' and 'A100-SXM4-80GB' are how the driver spells catalogue devices."""
    words = driver_name.replace("-", " ").split()
    sizes = [word for word in words if word.endswith("GB") and word[:-2].isdigit()]
    for guess in (driver_name, *(f"{words[0]}-{size}" for size in sizes), words[0]):
        try:
            return find_device(guess)
        except UnknownDevice:
            continue
    return None
