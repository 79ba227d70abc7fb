"""Worker processes of a loader: that they start, and leave signals to whom they read for.

A scheduler sends SIGTERM to all processes of a job. The trainer saves behind its step, for which it
may need another batch; a worker that dies meanwhile is an error in the trainer. So a worker goes on
until its loader has ended, or its parent is gone, and only then is the signal one to end at.

A job forks its workers while threads of its process group run, which may leave a child waiting for
what one of them held. A loader whose workers do not start is ended, and started anew.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from autopar.torch_private.modules import end_workers

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STARTS = 3
STARTED_S = 20.0
"""In which workers have started: a fork takes milliseconds."""
Init = Callable[[int], object]


class Workers:
    """The ``worker_init_fn`` of a `DataLoader`, behind which ``given``, the user's own, is called.

    Whether the loader has ended, and which of ``several`` workers run, are bytes that parent and
    workers share.
    """

    def __init__(self, given: Init | None = None, several: int = 0) -> None:
        self.given = given
        running: Any = torch.zeros(several, dtype=torch.uint8)
        self._running: torch.Tensor = running.share_memory_()
        ended: Any = torch.zeros(1, dtype=torch.uint8)
        self._ended: torch.Tensor = ended.share_memory_()
        self._parent = 0
        _LIVING.add(self)

    def end(self) -> None:
        """From now on a signal ends the workers, as `DataLoader` expects of those it stops."""
        self._ended.fill_(1)

    def start(self, make: Callable[[], DataLoader[Any]]) -> Iterator[Any]:
        """An iterator of the loader that ``make`` gives, whose workers run."""
        for last in (*(False,) * (STARTS - 1), True):
            self._running.zero_()
            reader = make()
            with self._starting():
                reads: Iterator[Any] = iter(reader)
            if last or not _forks(reader) or self._run_soon():
                break
            warnings.warn(
                f"workers of the loader did not start within {STARTED_S:.0f} s of a fork beside "
                "running threads: starting them again",
                stacklevel=2,
            )
            _end(reads)
        return reads

    def _run_soon(self) -> bool:
        late = time.monotonic() + STARTED_S
        while not bool(self._running.all()):
            if time.monotonic() > late:
                return False
            time.sleep(0.002)
        return True

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """What starts workers: no signal reaches one before it knows what to do with it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __call__(self, number: int) -> None:
        self._running[number] = 1
        self._parent = os.getppid()
        for one in SIGNALS:
            signal.signal(one, self._signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.given is not None:
            self.given(number)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._ended.item() or os.getppid() != self._parent:
            os._exit(0)


def _forks(reader: DataLoader[Any]) -> bool:
    context: Any = reader.multiprocessing_context
    return bool((context or multiprocessing).get_start_method() == "fork")


def _end(reads: Any) -> None:
    """Ends workers of which some do not listen."""
    for worker in end_workers(reads):
        worker.kill()
        worker.join()


_LIVING: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Before workers are stopped at the exit of their parent, which an error may have caused."""
    for workers in _LIVING:
        workers.end()
