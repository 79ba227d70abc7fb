"""How far off a prediction may be: the cost model's errors on published runs, as a band."""

from __future__ import annotations

from autopar.cost_models.constants import constant


def time_band(step_time_s: float) -> tuple[float, float]:
    """(least, most) seconds: a time is as likely too low by a factor as too high by it."""
    factor = 1 + constant("time_band")
    return step_time_s / factor, step_time_s * factor


def memory_band(total_bytes: int) -> tuple[int, int]:
    """(least, most) bytes of the peak."""
    share = constant("memory_band")
    return round(total_bytes * (1 - share)), round(total_bytes * (1 + share))
