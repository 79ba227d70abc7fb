"""Which plans that lost are worth a try on the devices at hand, and which of all tried is kept.

The fastest few are told apart by figures that are off by some percent; a few steps of each tell
more (DeepSpeed's autotuner and Galvatron's search do likewise).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from autopar.nouns.axes import CONTEXT, PIPELINE, SAMPLES, TENSOR
from autopar.nouns.layout import Pins
from autopar.nouns.plan import Plan, RunnerUp

DEGREES = (*SAMPLES, CONTEXT, TENSOR, PIPELINE)
RUNS = 2
"""Of each plan: two of the same one say what is noise."""


def worth_trying(plan: Plan, samples: int, several: int) -> list[Pins]:
    """The pins of at most ``several`` plans that lost and fit, fastest first; those that only
    recompute or offload more than another are left out.

    ``samples``: of a global batch.
    """
    seen = {(_degrees(plan.degrees), plan.stages[0].zero)}
    chosen: list[Pins] = []
    for lost in sorted(plan.runners_up, key=lambda lost: lost.step_time_s):
        if lost.zero is None or lost.memory_bytes > plan.prediction.memory_bytes.limit:
            continue
        degrees = _degrees(lost.degrees)
        if (degrees, lost.zero) in seen or len(chosen) == several:
            continue
        seen.add((degrees, lost.zero))
        chosen.append(_pins(lost, degrees, samples))
    return chosen


def _degrees(given: Mapping[str, int]) -> Pins:
    every: dict[str, Any] = {name: given.get(name, 1) for name in DEGREES}
    return Pins(**every)


def _pins(lost: RunnerUp, degrees: Pins, samples: int) -> Pins:
    ways = lost.microbatches * math.prod(getattr(degrees, axis) for axis in SAMPLES)
    return replace(
        degrees,
        zero=lost.zero,
        recompute=lost.recompute,
        offload=lost.offload,
        microbatch=max(1, samples // ways),
    )


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan that ran: its layout in words, its price, and the median step of each of its runs."""

    layout: str
    predicted_s: float
    runs_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        return median(self.runs_s)

    @property
    def noise(self) -> float:
        """How far its runs are from one another, as a share."""
        return (max(self.runs_s) - min(self.runs_s)) / self.measured_s


def kept(tried: Sequence[Tried]) -> int:
    """The place of the fastest as measured; between equals the one that was priced faster."""
    return min(range(len(tried)), key=lambda i: (tried[i].measured_s, tried[i].predicted_s))
