"""A layout that runs somewhere beside the one that is fastest here: what each takes, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autopar.planner.estimate import Estimate
from autopar.planner.layouts import typed
from autopar.report.estimates import to_object
from autopar.report.units import duration, size

SMALL = 0.01
"""Share of a step below which a part says nothing about the difference."""
MOST = 3
"""Parts that are named."""


def beside(theirs: Estimate, ours: Estimate | None) -> str:
    """Some sentences for a reader; ``ours`` is None where no layout fits."""
    yours = f"your layout: {duration(theirs.step_time_s)} and {size(theirs.memory.total)}"
    if not theirs.fits:
        yours += f" of {size(theirs.memory_limit_bytes)}, which does not fit"
    if ours is None:
        return f"{yours}; no layout of {theirs.layout.device_count} devices fits"
    if ours.layout == theirs.layout:
        return f"{yours}; it is the fastest that fits here"
    said = f"{yours}; this plan: {duration(ours.step_time_s)} and {size(ours.memory.total)}"
    why = reasons(theirs, ours)
    said += f", because {'; '.join(why)}" if why else ", in the same parts"
    return f"{said}\nthis plan is --fix {typed(ours.layout)}"


def reasons(theirs: Estimate, ours: Estimate) -> list[str]:
    """The parts of time and memory that differ most, the largest first."""
    one, two = asdict(theirs.parts), asdict(ours.parts)
    found = _differences(
        {
            n.removesuffix("_s").replace("_", " "): float(two[n]) - float(one[n])
            for n in one
            if n != "total_s"
        },
        SMALL * max(theirs.step_time_s, ours.step_time_s),
    )
    said = [f"{name} takes {duration(abs(d))} {'more' if d > 0 else 'less'}" for name, d in found]
    before, after = dict(theirs.memory.parts()), dict(ours.memory.parts())
    names = dict.fromkeys([*before, *after])
    sizes = {name: float(after.get(name, 0) - before.get(name, 0)) for name in names}
    largest = max(theirs.memory.total, ours.memory.total)
    for name, d in _differences(sizes, 2 * SMALL * largest)[:2]:
        said.append(f"{size(abs(d))} {'more' if d > 0 else 'less'} of {name}")
    return said


def _differences(parts: dict[str, float], least: float) -> list[tuple[str, float]]:
    rows = sorted(parts.items(), key=lambda row: -abs(row[1]))
    return [row for row in rows if abs(row[1]) >= least][:MOST]


def beside_object(theirs: Estimate, ours: Estimate | None) -> dict[str, Any]:
    """The same as an object for ``--json``."""
    found: dict[str, Any] = {"yours": to_object(theirs), "ours": None, "because": []}
    if ours is not None:
        found["ours"] = {**to_object(ours), "fix": typed(ours.layout)}
        found["because"] = reasons(theirs, ours)
    return found
