"""How far off a prediction may be: the cost model's errors on published runs, as a band."""

from __future__ import annotations

from autopar.cost_models import bands
from autopar.nouns.cluster import Cluster


def time_band(step_time_s: float, cluster: Cluster) -> tuple[float, float]:
    """(least, most) seconds of a step on `cluster`."""
    return bands.step_band(cluster.device).around(step_time_s)


def memory_band(total_bytes: int) -> tuple[int, int]:
    """(least, most) bytes of the peak."""
    least, most = bands.memory_band().around(total_bytes)
    return round(least), round(most)
