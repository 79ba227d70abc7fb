"""How unevenly routes went to experts in a run, kept in a profile.

A model's loads follow from its weights and data, so a row is of a model (the fingerprint of its
graph), whatever machine ran it. What `Measurement.seconds` holds is here no time: the rows of the
busiest expert over the mean.
"""

from __future__ import annotations

from pathlib import Path

from autopar.cost_models.profile_db import Measurement, ProfileDb
from autopar.nouns.imbalance import Imbalance

SUBJECT = "routes"
_HOW = ("mean", "worst")


def rows_of(model: str, mean: float, worst: float, steps: int, when: str) -> list[Measurement]:
    """What a profile keeps of a run of ``steps`` steps."""
    pairs = zip(_HOW, (mean, worst), strict=True)
    return [
        Measurement(SUBJECT, f"{how} {model}", 0.0, 0.0, ratio, 0.0, steps, when)
        for how, ratio in pairs
    ]


def measured_routes(profile: str | Path, device: str, model: str) -> Imbalance | None:
    """Of the model with this fingerprint, as its last run had it, on ``device`` if there was one.

    None where it was not run. Raises `ProfileError`.
    """
    with ProfileDb.reading(profile) as db:
        machines = sorted(db.machines(), key=lambda machine: machine.device == device)
        ran = [m for machine in machines for m in db.measurements(machine) if m.subject == SUBJECT]
    known = {m.key: m for m in ran}
    mean, worst = (known.get(f"{how} {model}") for how in _HOW)
    if mean is None or worst is None:
        return None
    source = f"measured in {mean.repeats} steps on {mean.measured_at[:10]}, {Path(profile).name}"
    return Imbalance(mean.seconds, worst.seconds, source)
