"""Calls that keep little and make the rest again themselves: what a block that recomputes keeps of
products and collectives does not mean those inside of such a call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    """Of a thread: backward may run in another than forward did."""

    inside: bool = False


_here = _Here()


@contextmanager
def by_itself() -> Iterator[None]:
    """In it nothing is kept for backward but by the call that runs."""
    before, _here.inside = _here.inside, True
    try:
        yield
    finally:
        _here.inside = before


def inside() -> bool:
    """Whether such a call computes."""
    return _here.inside
