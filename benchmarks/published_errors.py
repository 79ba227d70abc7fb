"""How far predictions are from published runs: errors, ranking inside groups, rows that defy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.software import Software
from autopar.nouns.layout import Layout
from autopar.planner.family.runs import peak_bytes
from benchmarks.published_bands import Ratio
from benchmarks.published_fit import Fit
from benchmarks.published_rows import Run

Array = NDArray[np.float64]
TARGETS: dict[str, tuple[float, ...]] = {
    "dense, A100 and H100": (0.075, 0.22, 0.065, 0.19),
    "dense, other devices": (0.12, 0.35, 0.09, 0.25),
    "moe": (0.15, 0.40, 0.09, 0.30),
    "cp > 1": (0.08, 0.18),
    "ep > 1": (0.10, 0.25),
    "TPUs with a step time": (0.10,),
    "peak memory": (0.06, 0.22, 0.055, 0.18),
}
"""Of a class the largest median and 90th percentile with sources left out, and where there are more
with configurations left out."""
AMONG: dict[str, Callable[[Run], bool]] = {
    "cp > 1": lambda run: run.layout.cp > 1,
    "ep > 1": lambda run: run.arch.is_moe and run.layout.ep > 1,
}
"""Runs of any class that split sequences, or experts, over ranks."""
TIMED: dict[str, Callable[[Run], bool]] = {
    "TPUs with a step time": lambda run: run.timed and run.cluster.device.family == "tpu",
}
"""Runs whose source publishes how long a step takes."""
MOST_MEMORY = 0.10
"""The largest median error of the peak memory of either."""
# The least mean tau and, where there is one, the largest mean regret.
RANKING_TARGETS: dict[str, tuple[float, float | None]] = {
    "source_left_out": (0.60, 0.03),
    "configuration_left_out": (0.70, None),
}


def errors(fit: Fit, predicted: Array, members: NDArray[np.bool_]) -> dict[str, float]:
    """Median and 90th percentile of the absolute error, and the median signed one.

    ``members``: a mask over the fit's runs.
    """
    relative = predicted[members] / fit.measured[members] - 1
    relative = relative[~np.isnan(relative)]
    return _summary(relative)


def classes(runs: Sequence[Run]) -> Mapping[str, NDArray[np.bool_]]:
    """Masks over the runs: by device and architecture, then `AMONG` and `TIMED` of all of them."""
    names = np.array([run.device_class for run in runs])
    masks = {str(name): names == name for name in np.unique(names)}
    others = AMONG | TIMED
    return masks | {name: np.array([among(run) for run in runs]) for name, among in others.items()}


def _summary(relative: Array) -> dict[str, float]:
    if relative.size == 0:
        return {"count": 0.0, "median": 0.0, "p90": 0.0, "bias": 0.0}
    return {
        "count": float(relative.size),
        "median": float(np.median(np.abs(relative))),
        "p90": float(np.percentile(np.abs(relative), 90)),
        "bias": float(np.median(relative)),
    }


def memory_ratios(
    runs: Sequence[Run], among: Callable[[Run], bool] = lambda run: True
) -> list[Ratio]:
    """Measured over predicted peak, once a configuration; no constant is fitted to these."""
    by_key: dict[str, Ratio] = {}
    for run in runs:
        if run.memory_bytes and among(run):
            total = peak_bytes(run.priced)
            by_key[run.key] = Ratio("peak memory", run.source, run.memory_bytes / total)
    return list(by_key.values())


def memory_errors(runs: Sequence[Run]) -> dict[str, Any]:
    """Errors of the peak memory, altogether and by source."""
    ratios = memory_ratios(runs)
    return {
        "all": _summary(np.array([1 / r.value - 1 for r in ratios])),
        "sources": {
            name: _summary(np.array([1 / r.value - 1 for r in ratios if r.source == name]))
            for name in sorted({r.source for r in ratios})
        },
        **{
            name: _summary(np.array([1 / r.value - 1 for r in memory_ratios(runs, among)]))
            for name, among in AMONG.items()
        },
        "targets": TARGETS["peak memory"],
    }


def ranking(fit: Fit, predicted: Array) -> dict[str, float]:
    """Kendall's tau over pairs more than 3 % apart and regret of the pick, in groups."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(fit.runs):
        groups.setdefault(run.group, []).append(i)
    taus, regrets = [], []
    for members in groups.values():
        if len(members) < 2:
            continue
        agree = []
        for a, i in enumerate(members):
            for j in members[a + 1 :]:
                measured = np.log(fit.measured[i] / fit.measured[j])
                if abs(measured) > np.log(1.03):
                    agree.append(np.sign(measured) * np.sign(np.log(predicted[i] / predicted[j])))
        if not agree:
            continue
        taus.append(float(np.mean(agree)))
        pick = min(members, key=lambda i: predicted[i])
        regrets.append(float(fit.measured[pick] / min(fit.measured[i] for i in members) - 1))
    return {
        "groups": float(len(taus)),
        "mean_tau": float(np.mean(taus)) if taus else 0.0,
        "mean_regret": float(np.mean(regrets)) if regrets else 0.0,
    }


def schedules_in_order(fit: Fit, predicted: Array) -> tuple[int, int, int]:
    """Of pairs of runs that differ in their schedule and what belongs to it, more than 3 % apart:
    how many are predicted in their order, how many there are, and of how many sources."""
    right, sources = 0, []
    for a, b in combinations(range(len(fit.runs)), 2):
        one, other = fit.runs[a], fit.runs[b]
        if one.group != other.group or not _schedules_differ(one, other):
            continue
        measured = np.log(fit.measured[a] / fit.measured[b])
        if abs(measured) > np.log(1.03):
            sources.append(one.source)
            right += bool(measured * np.log(predicted[a] / predicted[b]) > 0)
    return right, len(sources), len(set(sources))


def _schedules_differ(one: Run, other: Run) -> bool:
    """In the schedule; in nothing else but stages a rank, and whether ranks begin their next step
    alone, which authors of a schedule make part of it (Qi et al. 2023, section 4)."""

    def rest(run: Run) -> tuple[Layout, Software]:
        layout = replace(run.layout, schedule="", interleave=1)
        return layout, replace(run.software, steps_overlap=False)

    return one.layout.schedule != other.layout.schedule and rest(one) == rest(other)


def defying(fit: Fit, predicted: Array) -> list[dict[str, Any]]:
    """Configurations that the model misses by more than 35 %."""
    runs = []
    for run, p, m in zip(fit.runs, predicted, fit.measured, strict=True):
        if abs(np.log(p / m)) > np.log(1.35):
            runs.append({"id": run.id, "error": float(p / m - 1), "likely": run.likely})
    return sorted(runs, key=lambda row: -abs(row["error"]))
