"""Random numbers of a pipeline: those of a microbatch in a stage do not depend on the order of
actions, nor on what else a rank does."""

from __future__ import annotations

from types import TracebackType

import torch

from autopar.runtime.pytorch.dropout import stream

_SEEDS = 1 << 62
_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: multiples of it spread over all seeds."""


class Seeds:
    """Around a step; called before each forward. Ranks that share a stream of numbers, which are
    those of one place on the data axes, draw one number a step from it."""

    def __init__(self, microbatches: int, device: torch.device) -> None:
        self._microbatches = microbatches
        self._stream = stream(device)
        self._seed = 0
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def __enter__(self) -> Seeds:
        self._seed = int(torch.empty((), dtype=torch.int64).random_(_SEEDS))
        self._kept = torch.default_generator.get_state(), self._stream.get_state()
        return self

    def __call__(self, stage: int, microbatch: int) -> None:
        place = 1 + stage * self._microbatches + microbatch
        seed = (self._seed + place * _STEP) % (1 << 63)
        # torch.manual_seed takes every kind of device that there might be, and 0.2 ms
        torch.default_generator.manual_seed(seed)
        self._stream.manual_seed(seed)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._kept is not None
        torch.default_generator.set_state(self._kept[0])
        self._stream.set_state(self._kept[1])
