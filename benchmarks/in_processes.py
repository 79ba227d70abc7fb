"""A piece of work for each name, each in a process of its own, several at a time, none too long."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Made = TypeVar("Made")


def each(
    names: Sequence[str],
    work: Callable[[str], Made],
    lost: Callable[[str, str, float], Made],
    workers: int,
    limit_s: float,
    preloaded: Sequence[str] = (),
) -> Iterator[Made]:
    """``work(name)`` as it comes; ``lost(name, why, seconds)`` where the process ended without, or
    took longer than ``limit_s``. ``work`` is a module's own function, or a `functools.partial`;
    ``preloaded`` modules are imported once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    waiting = list(reversed(names))
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_send, args=(theirs, work, name))
            process.start()
            theirs.close()
            running[ours] = (name, process, time.monotonic())
        ready = wait(list(running), timeout=1.0)
        for ours in list(running):
            name, process, start = running[ours]
            late = time.monotonic() - start
            if ours in ready:
                try:
                    yield ours.recv()
                except EOFError:
                    yield lost(name, "the process ended", late)
            elif late > limit_s:
                process.kill()
                yield lost(name, f"more than {limit_s:.0f} s", late)
            else:
                continue
            process.join()
            ours.close()
            del running[ours]


def _send(answer: Connection, work: Callable[[str], Any], name: str) -> None:
    answer.send(work(name))
