"""How long the phases of a training step take on this process."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

PHASES = ("forward", "backward", "exchange", "optimizer")
"""``backward`` holds the exchange of gradients that runs beside it, ``exchange`` what is left."""


class Stopwatch:
    """Laps of one step. On a GPU the marks are events in its stream: nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Forgets the step before."""
        self._marks = [("", self._now())]

    def lap(self, phase: str) -> None:
        """What has passed since the last mark was ``phase``."""
        self._marks.append((phase, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; on a GPU this waits for the step to end."""
        spent = dict.fromkeys(PHASES, 0.0)
        if self._on_gpu:
            torch.cuda.synchronize()
        for (_, before), (phase, after) in pairwise(self._marks):
            spent[phase] += before.elapsed_time(after) / 1e3 if self._on_gpu else after - before
        return spent
