"""What attention around a ring gave, kept by a block that recomputes instead of what it is made of.

A block that keeps what collectives or attention kernels gave would keep, of a ring, every piece
that came and the result of every step: n times what the whole leaves. It keeps the whole.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from autopar.runtime.pytorch.made_again import by_itself
from autopar.torch_private.modes import uncounted

Result = tuple[Tensor | None, ...]


class _Here(threading.local):
    """Of a thread: backward may run in another than forward did."""

    store: deque[Result] | None = None
    again: bool = False
    mode: Any = None
    """Of selective checkpointing, which sees the ops of a forward."""


_here = _Here()


@contextmanager
def kept(store: deque[Result], again: bool, mode: Any = None) -> Iterator[None]:
    """Inside, results go into ``store``; where a forward runs ``again`` they come out of it.

    ``mode``: for which the ops of a ring do not count. It runs once, and what comes after it is
    known again by how many calls of the same op came before.
    """
    before = _here.store, _here.again, _here.mode
    _here.store, _here.again, _here.mode = store, again, mode
    try:
        yield
    finally:
        _here.store, _here.again, _here.mode = before


def computed(compute: Callable[[], Result]) -> Result:
    """``compute()``, or what it gave when the block ran first. A second backward computes again."""
    store = _here.store
    if store and _here.again:
        return store.popleft()
    with by_itself(), uncounted(_here.mode):
        made = compute()
    if store is not None and not _here.again:
        store.append(tuple(x if x is None else x.detach() for x in made))
    return made
