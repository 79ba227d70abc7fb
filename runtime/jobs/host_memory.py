"""The C library's heap under a training process on a CPU, and what the process holds.

glibc gives large blocks back to the kernel when they are freed, so that every step pays again for
each page of its activations and gradients: a fault and 4 KiB of zeros, which on a virtual machine
costs more than computing what goes there. A training step needs the same blocks again and again:
its processes keep them, in large pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # a rank is a core
    # Other C libraries ignore it; glibc before 2.35 has no large pages and keeps the blocks.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
    ":glibc.malloc.hugetlb=1",
    # An import that looks for GPUs through CUDA would keep forked ranks from using them.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Of a training process, most for a CPU; what the user has set stays. Read when it starts."""

_STATUS = Path("/proc/self/status")


@contextmanager
def environment() -> Iterator[None]:
    """Processes that are started inside have `ENVIRONMENT`."""
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    os.environ.update({name: ENVIRONMENT[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def forget_peak() -> None:
    """Lets the peak of `resident_bytes` start again from now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(peak: bool = False) -> int:
    """Physical memory of this process, now or at its peak; 0 where the system does not say."""
    name = "VmHWM" if peak else "VmRSS"
    if not _STATUS.is_file():
        return 0
    line = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return int(line.group(1)) * 1024 if line else 0
