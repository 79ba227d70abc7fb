"""What no machine does: figures are checked against it where they are made, before they are shown.

A figure that breaks one of these bounds is a mistake in the pricing, whatever the input, so it is
told as one instead of being printed. What a user measured (`calibrate`) is held to them before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.nouns.errors import UserError

ROUNDING = 1e-9
"""Relative; sums of the same numbers in another order differ by less."""


class Impossible(UserError):
    """A figure that physics forbids; the message names it and the bound that it breaks."""


@dataclass(frozen=True, slots=True)
class Bound:
    """``value`` of the figure called ``name`` must lie from ``least`` to ``most``.

    why: what the bounds are, in a few words.
    """

    name: str
    value: float
    least: float = 0.0
    most: float = math.inf
    why: str = "neither negative nor infinite"

    @property
    def holds(self) -> bool:
        slack = ROUNDING * abs(self.value)
        return math.isfinite(self.value) and self.least - slack <= self.value <= self.most + slack


def broken(bounds: Iterable[Bound]) -> str:
    """Of the first of ``bounds`` that does not hold, what it came out as and must be; else ""."""
    for bound in bounds:
        if not bound.holds:
            return (
                f"{bound.name} came out as {bound.value:g}, and must be {bound.why} "
                f"({bound.least:g} to {bound.most:g})"
            )
    return ""


def check(bounds: Iterable[Bound]) -> None:
    """Raises `Impossible` for the first of ``bounds`` that does not hold."""
    if alarm := broken(bounds):
        raise Impossible(
            f"internal error: {alarm}. No figure of this plan is to be trusted; please report it "
            "with the model, the cluster file and the command"
        )


def time_bounds(
    step_s: float, parts_s: Mapping[str, float], at_peak_s: float, least_s: float = 0.0
) -> list[Bound]:
    """Of a step: longer than each of its parts, than its arithmetic at the peaks of all devices,
    and than ``least_s``, what the search proved."""
    bounds = [
        Bound("step time", step_s, at_peak_s, math.inf, "at least its arithmetic at peak"),
        Bound("step time", step_s, least_s, math.inf, "at least the lower bound"),
        Bound("step time", step_s, math.ulp(0.0), math.inf, "more than nothing"),
        Bound("lower bound", least_s),
    ]
    return bounds + [
        Bound(name, part, 0.0, step_s, "within the step time") for name, part in parts_s.items()
    ]


def band_bounds(name: str, value: float, band: tuple[float, float]) -> list[Bound]:
    """Of a prediction inside its band."""
    least, most = band
    return [
        Bound(f"low end of the band of {name}", least, 0.0, value, "at most the prediction"),
        Bound(f"high end of the band of {name}", most, value, why="at least the prediction"),
    ]


def memory_bounds(
    total: float, parts: Mapping[str, float], least: Mapping[str, float] | None = None
) -> list[Bound]:
    """Of a device's peak in bytes: the sum of its parts, each with at least its share in
    ``least`` (the whole model's over all devices)."""
    held = least or {}
    bounds = [
        Bound(f"memory of {name}", part, held.get(name, 0.0), total, "its share of the model's")
        for name, part in parts.items()
    ]
    whole = sum(parts.values())
    return [*bounds, Bound("total memory", total, whole, whole, "the sum of its parts")]
