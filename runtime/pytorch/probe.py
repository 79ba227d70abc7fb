"""Recording what a PyTorch program computes, value by value and gradient by gradient.

A program can print every result through ``probe("block::name", x, "tp:S1")``. Outside of
`recording` that returns ``x``. Inside, the local value and its gradient are kept, for
`autopar.runtime.verify.differences` to put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from autopar.runtime.shared.seen import Seen

_recorder: list[Seen] | None = None
_only: str | None = None
_listening = True


def probe(name: str, x: torch.Tensor, sharding: str = "R") -> torch.Tensor:
    """``x`` itself, noted under ``name`` while `recording`.

    ``sharding`` is that of the result over all axes, the microbatch included.
    """
    if _recorder is not None and _listening and _only in (None, name):
        seen = Seen(name, sharding, x.detach().clone())
        _recorder.append(seen)
        if x.requires_grad:
            x.register_hook(partial(_keep, seen))  # type: ignore[no-untyped-call]
    return x


def _keep(seen: Seen, gradient: torch.Tensor) -> None:
    seen.gradient = gradient.detach().clone()


def listen(on: bool) -> None:
    """Whether `probe` notes anything from here on, while `recording`."""
    global _listening
    _listening = on


@contextmanager
def recording(only: str | None = None) -> Iterator[list[Seen]]:
    """Inside, `probe` appends to the list that this yields, in the order of the calls. ``only``:
    the one result that is kept."""
    global _recorder, _only, _listening
    before = _recorder, _only, _listening
    _recorder, _only, _listening = [], only, True
    try:
        yield _recorder
    finally:
        _recorder, _only, _listening = before
