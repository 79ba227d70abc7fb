"""Kernels that numba compiles when they are first called are compiled by one worker of the tests;
the others wait for it, and read what it wrote."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def by_one_process(compile_one: Callable[[Any, Any], Any], lock: Path) -> Callable[[Any, Any], Any]:
    """``compile_one(dispatcher, signature)``, while no other process that has ``lock`` is in it."""
    thread = threading.RLock()
    inside: list[Any] = []

    def compiled(dispatcher: Any, signature: Any) -> Any:
        with thread:
            if inside:  # a kernel that another one calls
                return compile_one(dispatcher, signature)
            with lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                inside.append(signature)
                try:
                    return compile_one(dispatcher, signature)
                finally:
                    inside.pop()

    return compiled
