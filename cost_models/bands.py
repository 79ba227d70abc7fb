"""How far off a prediction may be: measured over predicted on published runs, as an 80 % interval.

The ends are the 10th and 90th percentile over configurations, each predicted by constants fitted
without its source; `python -m benchmarks.published CSV --fit` writes them to `bands.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml

from autopar.cost_models.constants import How
from autopar.nouns.cluster import Device

RunClass = Literal["dense, A100 and H100", "dense, other devices", "moe"]

_FILE = Path(__file__).with_name("bands.yaml")


@dataclass(frozen=True)
class Band:
    """Factors on a prediction between which four of five measurements lie."""

    low: float
    high: float
    how: How
    basis: str

    def around(self, value: float) -> tuple[float, float]:
        """(least, most) where `value` is predicted; never without the prediction itself."""
        return value * min(1.0, self.low), value * max(1.0, self.high)


ASSUMED_CORE = Band(
    0.5, 2.0, "assumed", "no measured run: figures of a CPU that are assumed, off by two or more"
)
"""Cores of two makers and three generations differ by as much in float32 products."""

MEASURED_CORE = Band(
    0.6,
    1.3,
    "assumed",
    "a small model in four processes that share two cores: 0.64 to 0.90 of what "
    "a measurement of some seconds predicts",
)
"""Six runs of `examples/02_gpt.py` on one machine, a measurement before each, idle and loaded."""


@lru_cache(maxsize=1)
def bands() -> dict[str, Band]:
    """Every band by name: a class of runs, or "peak memory"."""
    rows = yaml.safe_load(_FILE.read_text())
    return {
        name: Band(float(row["low"]), float(row["high"]), row["how"], row["basis"])
        for name, row in rows.items()
    }


def run_class(family: str, routed: bool = False) -> RunClass:
    """The class of a run on a device of `family`; `routed` where the model has experts."""
    if routed:
        return "moe"
    return "dense, A100 and H100" if family in ("ampere", "hopper") else "dense, other devices"


def time_band(family: str, routed: bool = False) -> Band:
    """The band of a step time on a device of `family`."""
    return bands()[run_class(family, routed)]


def step_band(device: Device, routed: bool = False) -> Band:
    """The band of a step time on a device: `time_band`, which no CPU is in, or a core's own."""
    if device.kind == "cpu":
        return MEASURED_CORE if device.rates else ASSUMED_CORE
    return time_band(device.family, routed)


def memory_band() -> Band:
    """The band of a peak memory of declared definition."""
    return bands()["peak memory"]
