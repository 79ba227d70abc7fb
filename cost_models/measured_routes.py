"""How unevenly routes went to experts in a run, kept in a profile.

A model's loads follow from its weights and data, so a row is of a model (the fingerprint of its
graph), whatever machine ran it. What `Measurement.seconds` holds is here no time: the rows of the
busiest expert over the mean, and of each expert of a layer that had any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from autopar.cost_models.profile_db import Measurement, ProfileDb
from autopar.nouns.imbalance import Imbalance

SUBJECT = "routes"
_HOW = ("mean", "worst")
_LOAD = "load"


def rows_of(
    model: str,
    mean: float,
    worst: float,
    steps: int,
    when: str,
    loads: Mapping[str, Sequence[float]] | None = None,
) -> list[Measurement]:
    """What a profile keeps of a run of ``steps`` steps; ``loads``: rows of each expert by layer."""
    pairs = [(f"{how} {model}", ratio) for how, ratio in zip(_HOW, (mean, worst), strict=True)]
    pairs += _ratios(model, loads or {})
    return [Measurement(SUBJECT, key, 0.0, 0.0, ratio, 0.0, steps, when) for key, ratio in pairs]


def _ratios(model: str, loads: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, float]]:
    """Rows over those of the layer's mean expert; experts without any are left out."""
    for layer, rows in loads.items():
        for expert, own in enumerate(rows):
            if own:
                key = f"{_LOAD} {model} {expert}/{len(rows)} {layer}"
                yield key, own * len(rows) / sum(rows)


def measured_routes(profile: str | Path, device: str, model: str) -> Imbalance | None:
    """Of the model with this fingerprint, as its last run had it, on ``device`` if there was one.

    None where it was not run. Raises `ProfileError`.
    """
    with ProfileDb.reading(profile) as db:
        machines = sorted(db.machines(), key=lambda machine: machine.device == device)
        each = [[m for m in db.measurements(one) if m.subject == SUBJECT] for one in machines]
    for ran in reversed(each):
        known = {m.key: m for m in ran}
        mean, worst = (known.get(f"{how} {model}") for how in _HOW)
        if mean is not None and worst is not None:
            day, file = mean.measured_at[:10], Path(profile).name
            source = f"measured in {mean.repeats} steps on {day}, {file}"
            return Imbalance(mean.seconds, worst.seconds, source, _loads(ran, model))
    return None


def _loads(ran: Iterable[Measurement], model: str) -> dict[str, tuple[float, ...]]:
    """By layer, of its last run: what an earlier one left of experts that had no rows since is not
    taken."""
    layers: dict[str, list[tuple[Measurement, int, int]]] = {}
    for m in ran:
        subject, _, rest = m.key.partition(" ")
        of_model, _, rest = rest.partition(" ")
        if (subject, of_model) == (_LOAD, model):
            place, _, layer = rest.partition(" ")
            expert, _, experts = place.partition("/")
            layers.setdefault(layer, []).append((m, int(expert), int(experts)))
    loads = {}
    for layer, rows in layers.items():
        last = max(m.measured_at for m, _, _ in rows)
        latest = [each for each in rows if each[0].measured_at == last]
        _, _, count = latest[0]
        ratios = {number: m.seconds for m, number, _ in latest}
        loads[layer] = tuple(ratios.get(number, 0.0) for number in range(count))
    return loads
