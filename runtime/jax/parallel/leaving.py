"""How a process of several leaves: where it fails, at once.

Leaving in order waits for all processes. One that failed would wait for others that wait for its
part of a collective, and one whose peer is gone until that has missed its heartbeats (100 s).
"""

from __future__ import annotations

import atexit
import functools
import os
import sys

import jax


@functools.cache
def leave_at_once() -> None:
    """From here on this process, where it is one of several, ends without waiting for the others
    once an exception that nobody caught has been printed."""
    count, number = jax.process_count(), jax.process_index()
    if count > 1:
        atexit.register(_leave, number, count)


def _leave(number: int, count: int) -> None:
    if getattr(sys, "last_value", None) is None:
        return
    sys.stdout.flush()
    print(
        f"process {number} of {count} ends at once; where a collective failed, another process "
        "ended before it, whose own output says why",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
