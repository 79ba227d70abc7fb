"""Classes of published kernels: errors, targets, and what of them is met.

A row is judged by the constants that saw no row of its device (`kernel_constants(without=...)`).
Time of a loss whose forward makes the gradients says nothing apart, so of chunked losses only whole
steps (`full`) are judged; overlap by whether a gain was predicted where one was measured, and whole
steps in two precisions by the gain's error in points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.kernels.constants import kernel_constants
from benchmarks.kernel_prices import Priced, measured_s, priced
from benchmarks.kernel_rows import KernelRow

STREAMS = ("gated_activation", "fused_norm", "rope", "cross_entropy")
PRODUCTS = ("product", "fp8_linear", "grouped_gemm")
CLASSES: Mapping[str, tuple[str, ...]] = {
    "memory-bound, attention, products": (*STREAMS, "attention", *PRODUCTS),
    **{kind: (kind,) for kind in (*STREAMS, "attention", *PRODUCTS)},
    "collectives": ("collective", "all_to_all"),
    "collective": ("collective",),
    "all_to_all": ("all_to_all",),
    "tp_overlap": ("tp_overlap",),
    "fsdp_overlap": ("fsdp_overlap",),
}
MEDIANS = {"chunked loss": 0.06, "chunked loss, memory": 0.04, "collectives": 0.12,
           "memory-bound, attention, products": 0.10}  # fmt: skip
P90S = {"memory-bound, attention, products": 0.25}
LEAST_RIGHT = 0.9
MOST_POINTS = 0.08


@dataclass(frozen=True)
class Class:
    """Errors of one class: shares of what was measured, and what they are to be at most."""

    name: str
    errors: tuple[float, ...]
    median_target: float | None = None
    p90_target: float | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.errors)) if self.errors else 0.0

    @property
    def p90(self) -> float:
        return float(np.quantile(self.errors, 0.9)) if self.errors else 0.0

    def data(self) -> dict[str, object]:
        """The line of this class."""
        known, limits = bool(self.errors), self.limits()
        return {
            "class": self.name,
            "n": len(self.errors),
            "median": self.median if known else None,
            "p90": self.p90 if known else None,
            "target": " / ".join(f"{limit:.2f}" for _, _, limit in limits) or None,
            "met": all(value <= limit for _, value, limit in limits) if limits else None,
        }

    def limits(self) -> list[tuple[str, float, float]]:
        """Name, value and limit of what is judged of this class."""
        limits = (
            ("median", self.median, self.median_target),
            ("p90", self.p90, self.p90_target),
        )
        return [
            (f"{self.name}, {name}", value, limit)
            for name, value, limit in limits
            if limit is not None and self.errors
        ]


def prices(rows: Sequence[KernelRow]) -> dict[str, Priced]:
    """The prediction for each row by the constants that saw no row of its device."""
    return {row.id: priced(row, kernel_constants(row.family)) for row in rows}


def classes(rows: Sequence[KernelRow], predicted: Mapping[str, Priced]) -> list[Class]:
    """Errors by class, those with targets first in their part."""
    timed = {row.id: _error(row, predicted[row.id]) for row in rows}
    losses = [row for row in rows if row.kind == "chunked_loss" and row.way == "full"]
    judged = [
        Class("chunked loss", _known(timed, losses), MEDIANS["chunked loss"]),
        Class("chunked loss, memory", _memory(losses, predicted), MEDIANS["chunked loss, memory"]),
    ]
    for name, kinds in CLASSES.items():
        errors = _known(timed, [row for row in rows if row.kind in kinds])
        judged.append(Class(name, errors, MEDIANS.get(name), P90S.get(name)))
    return [*judged, *_compared(rows, predicted)]


def _compared(rows: Sequence[KernelRow], predicted: Mapping[str, Priced]) -> list[Class]:
    wrong, points = overlaps(rows, predicted), gains(rows, predicted)
    signs = tuple(float(w) for w in wrong)
    # of so many wrong ones the median is none; their share is what is judged
    share = float(np.mean(signs)) if signs else 0.0
    right = Class("overlap gains, wrong of all", (share,) * len(signs), 1 - LEAST_RIGHT)
    return [right, Class("gain end to end, points", points, MOST_POINTS)]


def overlaps(rows: Sequence[KernelRow], predicted: Mapping[str, Priced]) -> list[bool]:
    """For each overlapped product whether its gain was predicted wrong: none for some, or some."""
    wrong = []
    for row, base in _pairs(rows, ("tp_overlap",)):
        times = (
            measured_s(row),
            measured_s(base),
            predicted[row.id].time_s,
            predicted[base.id].time_s,
        )
        if None not in times:
            one, other, predicted_one, predicted_other = (float(t or 0.0) for t in times)
            wrong.append((one < other) != (predicted_one < predicted_other))
    return wrong


def gains(rows: Sequence[KernelRow], predicted: Mapping[str, Priced]) -> tuple[float, ...]:
    """Errors of the gains of whole steps, as shares of the baseline."""
    errors = []
    for row, base in _pairs(rows, ("end_to_end",)):
        one, other = predicted[row.id].time_s, predicted[base.id].time_s
        if row.rate and base.rate and one and other:
            errors.append(abs(other / one - row.rate / base.rate))
    return tuple(errors)


def unpriced(predicted: Mapping[str, Priced]) -> Counter[str]:
    """How many rows are not priced, by reason."""
    return Counter(p.reason for p in predicted.values() if p.time_s is None)


def _pairs(rows: Sequence[KernelRow], kinds: tuple[str, ...]) -> list[tuple[KernelRow, KernelRow]]:
    by_id = {row.id: row for row in rows}
    chosen = [row for row in rows if row.kind in kinds and row.baseline_id in by_id]
    return [(row, by_id[row.baseline_id]) for row in chosen]


def _error(row: KernelRow, predicted: Priced) -> float | None:
    measured = measured_s(row)
    if not measured or predicted.time_s is None:
        return None
    return abs(predicted.time_s / measured - 1)


def _memory(rows: Sequence[KernelRow], predicted: Mapping[str, Priced]) -> tuple[float, ...]:
    pairs = [(row.memory_bytes, predicted[row.id].memory_bytes) for row in rows]
    return tuple(abs(p / m - 1) for m, p in pairs if m and p)


def _known(errors: Mapping[str, float | None], rows: Sequence[KernelRow]) -> tuple[float, ...]:
    return tuple(e for row in rows if (e := errors[row.id]) is not None)
