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


def memory_band() -> Band:
    """The band of a peak memory of declared definition."""
    return bands()["peak memory"]
