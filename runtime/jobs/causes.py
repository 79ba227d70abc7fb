"""Why a process of a job ended, in words, and what to do about it."""

from __future__ import annotations

import re
import signal

KILLED = {
    "SIGKILL": "out of memory? The kernel kills what asks for more than there is, and says so in "
    "dmesg. Plan for a cluster file with the memory that there is, or with less of it a rank: "
    "--fix zero=3, microbatch=1 or recompute=full",
    "SIGTERM": "from outside: a scheduler at its time limit or before a node is taken, or kill. "
    "Go on from a checkpoint by --resume; in a script trainer.keep_checkpoints saves when it comes",
    "SIGINT": "Ctrl-C, or kill -INT",
    **dict.fromkeys(
        ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"),
        "in code of a library, not of Python. PYTHONFAULTHANDLER=1 in the environment shows where",
    ),
    "SIGXCPU": "the limit of CPU time (ulimit -t)",
    "SIGPIPE": "nobody reads what it writes",
}
MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate|RESOURCE_EXHAUSTED|std::bad_alloc", re.I
)
LESS = (
    "It needs more memory than there is: plan with less a device, --fix zero=3, microbatch=1 or "
    "recompute=full, or give the cluster file the memory that devices have"
)


def name_of(code: int) -> str:
    """``SIGKILL`` of an exit code below 0, which is minus a signal."""
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def killed_by(code: int, at: str = "") -> str:
    """The signal, ``at`` which place it came, and in brackets what from and what to do."""
    name = name_of(code)
    where = f"{name} {at}" if at else name
    return f"{where} ({KILLED[name]})" if name in KILLED else where


def remedy(error: str, message: str) -> str:
    """What to do about an exception by its class and message; empty where these do not say."""
    if error in ("MemoryError", "OutOfMemoryError") or MEMORY.search(message):
        return LESS
    return ""
