"""The band of a prediction: 80 % of measured over predicted, and how many rows it covers.

The interval of a class is taken over all its configurations, each predicted without its source; the
coverage over configurations whose whole source is left out of the interval too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopar.cost_models.bands import bands, run_class
from benchmarks.published_rows import Run

TARGET = Path(__file__).parents[1] / "cost_models" / "bands.yaml"
_ENDS = (10.0, 90.0)


@dataclass(frozen=True)
class Ratio:
    """Measured over predicted of one configuration."""

    name: str
    """The band that it belongs to."""
    source: str
    value: float


def time_ratios(runs: Sequence[Run], predicted_s: Sequence[float]) -> list[Ratio]:
    """One ratio a run; the vision runs, whose software is not stated, are left out."""
    return [
        Ratio(run_class(run.cluster.device.family, run.arch.is_moe), run.source, run.measured_s / s)
        for run, s in zip(runs, predicted_s, strict=True)
        if run.measured_s and run.device_class != "vit"
    ]


def interval(ratios: Sequence[Ratio]) -> tuple[float, float]:
    """The 10th and 90th percentile."""
    low, high = np.percentile([ratio.value for ratio in ratios], _ENDS)
    return float(low), float(high)


def coverage(ratios: Sequence[Ratio]) -> float:
    """Share of the ratios inside the interval of the other sources' ratios."""
    inside = 0
    for source in {ratio.source for ratio in ratios}:
        others = [ratio for ratio in ratios if ratio.source != source]
        low, high = interval(others or ratios)
        inside += sum(low <= r.value <= high for r in ratios if r.source == source)
    return inside / len(ratios)


def report(ratios: Sequence[Ratio]) -> dict[str, dict[str, float]]:
    """For every band: its ends as shipped, and what share of these ratios it covers."""
    by_name = {}
    for name, band in bands().items():
        mine = [ratio for ratio in ratios if ratio.name == name]
        if mine:
            by_name[name] = {
                "low": band.low,
                "high": band.high,
                "count": float(len(mine)),
                "covers": float(np.mean([band.low <= r.value <= band.high for r in mine])),
                "covers_source_left_out": coverage(mine),
            }
    return by_name


def write_bands(ratios: Sequence[Ratio], target: Path = TARGET) -> None:
    """Write the interval of every band that has ratios; the others stay as they are."""
    lines = ["# Measured over predicted, 80 %, from `python -m benchmarks.published CSV --fit`."]
    for name, band in bands().items():
        mine = [ratio for ratio in ratios if ratio.name == name]
        low, high, basis = band.low, band.high, band.basis
        if mine:
            low, high = interval(mine)
            sources = len({ratio.source for ratio in mine})
            basis = f"80 % of {len(mine)} published configurations of {sources} sources"
        text = json.dumps(basis)
        lines.append(
            f"{json.dumps(name)}: {{low: {low:.4g}, high: {high:.4g}, how: fitted, basis: {text}}}"
        )
    target.write_text("\n".join(lines) + "\n")
    bands.cache_clear()
