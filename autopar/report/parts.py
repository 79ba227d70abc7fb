"""Where a step's time and a device's memory go, part by part, and where two of them differ."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.prediction import Prediction
from autopar.report.units import duration, size

SMALL = 0.01
"""Share of a step below which a part says nothing about the difference; of memory twice that."""
MOST = 3
"""Parts of time that are named; of memory two."""


def time_parts(predicted: Prediction) -> dict[str, float]:
    """Seconds by part; they add up to the step. Waiting and the rest: only where there is any."""
    parts = {
        "compute": predicted.compute_time_s,
        "communication not hidden": predicted.exposed_communication_s,
    }
    rest = predicted.step_time_s - sum(parts.values()) - predicted.waiting_time_s
    late = {
        "waiting for the slowest rank": predicted.waiting_time_s,
        "optimizer and the rest": rest,
    }
    return parts | {name: seconds for name, seconds in late.items() if seconds > 0}


def reasons(
    times: tuple[Mapping[str, float], Mapping[str, float]],
    sizes: tuple[Mapping[str, float], Mapping[str, float]],
) -> list[str]:
    """What the second has more or less of than the first: the parts that differ most.

    times: seconds by part, of both. sizes: bytes by part.
    """
    lines = [
        f"{name} takes {duration(abs(d))} {'more' if d > 0 else 'less'}"
        for name, d in _largest(*times, SMALL)[:MOST]
    ]
    for name, d in _largest(*sizes, 2 * SMALL)[: MOST - 1]:
        lines.append(f"{size(abs(d))} {'more' if d > 0 else 'less'} of {name}")
    return lines


def _largest(
    before: Mapping[str, float], after: Mapping[str, float], small: float
) -> list[tuple[str, float]]:
    """(part, how much more), the largest first, but for those below a share of the whole."""
    least = small * max(sum(before.values()), sum(after.values()))
    names = dict.fromkeys([*before, *after])
    rows = [(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in names]
    return sorted((r for r in rows if abs(r[1]) >= least and r[1]), key=lambda row: -abs(row[1]))
