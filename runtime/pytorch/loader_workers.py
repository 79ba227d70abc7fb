"""Worker processes of a loader that leave SIGTERM and SIGINT to the process that they read for.

A scheduler sends SIGTERM to all processes of a job. The trainer saves behind its step, for which it
may need another batch; a worker that dies meanwhile is an error in the trainer. So a worker goes on
until its loader has ended, or its parent is gone, and only then is the signal one to end at.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

SIGNALS = (signal.SIGTERM, signal.SIGINT)
Init = Callable[[int], object]


class Workers:
    """The ``worker_init_fn`` of a `DataLoader`, behind which ``given``, the user's own, is called.

    Whether the loader has ended is one byte that parent and workers share.
    """

    def __init__(self, given: Init | None = None) -> None:
        self.given = given
        self._ended = torch.zeros(1, dtype=torch.uint8)
        self._ended.share_memory_()  # type: ignore[no-untyped-call]
        self._parent = 0
        _LIVING.add(self)

    def end(self) -> None:
        """From now on a signal ends the workers, as `DataLoader` expects of those it stops."""
        self._ended.fill_(1)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """What starts workers: no signal reaches one before it knows what to do with it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __call__(self, number: int) -> None:
        self._parent = os.getppid()
        for one in SIGNALS:
            signal.signal(one, self._signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.given is not None:
            self.given(number)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._ended.item() or os.getppid() != self._parent:
            os._exit(0)


_LIVING: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Before workers are stopped at the exit of their parent, which an error may have caused."""
    for workers in _LIVING:
        workers.end()
