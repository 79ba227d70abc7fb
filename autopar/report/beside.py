"""A layout that runs somewhere beside the one that is fastest here: what each takes, and why."""

from __future__ import annotations

from typing import Any

from autopar.planner.family.estimate import Estimate
from autopar.report.estimates import to_object
from autopar.report.parts import reasons
from autopar.report.units import duration, size


def beside(theirs: Estimate, ours: Estimate | None) -> str:
    """Some sentences for a reader; ``ours`` is None where no layout fits."""
    yours = f"your layout: {duration(theirs.step_time_s)} and {size(theirs.memory.total)}"
    if not theirs.fits:
        yours += f" of {size(theirs.memory_limit_bytes)}, which does not fit"
    if ours is None:
        return f"{yours}; no layout of {theirs.layout.device_count} devices fits"
    if ours.layout == theirs.layout:
        return f"{yours}; it is the fastest that fits here"
    figures = f"{yours}; this plan: {duration(ours.step_time_s)} and {size(ours.memory.total)}"
    why = because(theirs, ours)
    figures += f", because {'; '.join(why)}" if why else ", in the same parts"
    pins = ours.layout.shortest().without("global_batch")  # the model has that
    return f"{figures}\nthis plan is --fix {pins}"


def because(theirs: Estimate, ours: Estimate) -> list[str]:
    """The parts of time and memory that differ most, the largest first."""
    return reasons((theirs.parts_s, ours.parts_s), (theirs.memory.parts(), ours.memory.parts()))


def beside_object(theirs: Estimate, ours: Estimate | None) -> dict[str, Any]:
    """The same as an object for ``--json``."""
    data: dict[str, Any] = {"yours": to_object(theirs), "ours": None, "because": []}
    if ours is not None:
        data["ours"] = {
            **to_object(ours),
            "fix": str(ours.layout.shortest().without("global_batch")),
        }
        data["because"] = because(theirs, ours)
    return data
