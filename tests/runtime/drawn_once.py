"""Initial values of a model, drawn once for all trainers of a process.

Drawing them is half of what a trainer of a tiny model costs. That ranks draw each its own pieces of
the same numbers is what `test_initialize` is about, and every job that `launch` starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import nn

from autopar.runtime.pytorch.initialize import Target, fill
from autopar.runtime.pytorch.recording import named_tensors


def initialize(make: Callable[[], nn.Module], seed: int, targets: Mapping[str, Target]) -> None:
    """As `autopar.runtime.pytorch.initialize`."""
    fill(_drawn(make, seed), targets)


@cache
def _drawn(make: Callable[[], nn.Module], seed: int) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: tensor.detach() for name, tensor in named_tensors(make())}
