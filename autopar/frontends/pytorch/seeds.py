"""A forward that seeds torch's random numbers, refused: its draws follow from the seed, not from
the stream that a program continues from step to step, and `verify` puts one number for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar.frontends.pytorch.build import is_internal
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.shared.places import caller


class _Unseedable:
    """torch's generator, which tells where it is seeded."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def manual_seed(self, seed: int) -> Any:
        raise UnsupportedOpError(
            f"{caller(sys._getframe(1), is_internal)}: torch.manual_seed({seed}) inside the "
            "forward: a program goes on drawing where the step before has stopped. Seed before "
            "training, or give what is drawn as an entry of the batch"
        )


@contextmanager
def seeds_allowed() -> Iterator[None]:
    """Inside, torch is seeded as always, by what is no part of the forward, and draws on as if it
    had not been."""
    module: Any = torch.random
    kept = module.default_generator
    module.default_generator = torch.default_generator
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        module.default_generator = kept


@contextmanager
def seeds_refused() -> Iterator[None]:
    """Inside, `torch.manual_seed` raises `UnsupportedOpError`; states may be kept and put back, as
    checkpointing does."""
    module: Any = torch.random
    kept = module.default_generator
    module.default_generator = _Unseedable(kept)
    try:
        yield
    finally:
        module.default_generator = kept
