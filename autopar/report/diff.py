"""What changed between two plans: decisions, the strategies of ops, predicted cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.nouns.choices import CHOICES
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Plan
from autopar.report.batches import Batches, batch_text, not_alike, sample_times_s, samples_of
from autopar.report.parts import reasons, time_parts
from autopar.report.render import indented, table
from autopar.report.units import count, degrees, duration, percent, size


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that two plans do differently, each side as text (``-``: not in that plan)."""

    what: str
    before: str
    after: str


Clusters = tuple[Cluster | None, Cluster | None]
"""Those that the two plans are for; None where a folder does not say."""


def decisions(
    a: Plan, b: Plan, clusters: Clusters = (None, None), batches: Batches = (None, None)
) -> list[Change]:
    """Choices that hold for the whole plan, and what it was made for."""
    sides = [
        {
            "model": f"{plan.workload.rpartition('/')[2]} ({plan.fingerprints.model})",
            **_cluster(plan, cluster),
            "global batch": batch_text(batch) if None not in batches else "-",
            "measured times": plan.fingerprints.profile.partition(" ")[0],
            "degrees": degrees(plan.degrees),
            "ZeRO": plan.each("zero"),
            "microbatches": str(plan.microbatches),
            "schedule": plan.schedule,
            "recompute": plan.each("recompute"),
            "offload": plan.each("offload"),
            **_choices(plan),
            "execution": plan.style,
            "precision": plan.precision,
            "optimizer": plan.optimizer,
            "clip_norm": "none" if plan.clip_norm is None else f"{plan.clip_norm:g}",
        }
        for plan, cluster, batch in zip((a, b), clusters, batches, strict=True)
    ]
    if a.fingerprints.model == b.fingerprints.model:
        for side in sides:
            del side["model"]
    changes = list(_changes(sides[0], sides[1], absent="-"))
    one, two = a.fingerprints.cluster, b.fingerprints.cluster
    if one != two and not any(c.what.startswith(("cluster", "measured")) for c in changes):
        here, there = (dict(_figures(c)) if c else {} for c in clusters)
        changes = [*_changes(here, there, absent="-"), *changes]
    return changes


def _choices(plan: Plan) -> dict[str, str]:
    values = {choice: choice.of(plan) for choice in CHOICES}
    return {c.label: c.usual if value is None else c.text(value) for c, value in values.items()}


def _figures(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Every figure by its place in the cluster's text form, ``cluster levels[0].latency_s``."""
    open_now: list[tuple[str, Any]] = [("cluster", json.loads(cluster.to_json()))]
    while open_now:
        place, value = open_now.pop()
        if isinstance(value, dict):
            gap = " " if place == "cluster" else "."
            open_now += [(f"{place}{gap}{name}", part) for name, part in value.items()]
        elif isinstance(value, list):
            open_now += [(f"{place}[{index}]", part) for index, part in enumerate(value)]
        else:
            yield place, f"{value:g}" if isinstance(value, float) else str(value)


def _cluster(plan: Plan, cluster: Cluster | None) -> dict[str, str]:
    """What a reader knows a cluster by, one row for each; only its fingerprint if that is all."""
    if cluster is None:
        return {"cluster": plan.fingerprints.cluster}
    return {
        "cluster": cluster.name,
        "cluster devices": " + ".join(f"{g.count} x {g.device.name}" for g in cluster.groups),
        "cluster memory": size(cluster.memory_bytes),
        "cluster links": ", ".join(
            f"{level.name} {level.span} at {level.bandwidth_bytes_per_s / 1e9:.4g} GB/s, "
            f"{duration(level.latency_s)}"
            for level in cluster.levels
        ),
    }


def strategies(a: Plan, b: Plan) -> list[Change]:
    """Ops whose strategy changed, parameters stored otherwise, and shared copies that moved."""
    changes: list[Change] = []
    for field, absent in (("ops", "whole"), ("parameters", "R"), ("shared", "-")):
        before, after = (
            {name: text for spread in plan.spreads for name, text in getattr(spread, field).items()}
            for plan in (a, b)
        )
        changes += _changes(before, after, absent)
    return changes


def costs(a: Plan, b: Plan, batches: Batches = (None, None)) -> list[tuple[str, str, str, str]]:
    """(quantity, before, after, change) for every predicted quantity."""
    one, two = a.prediction, b.prediction
    each = sample_times_s(batches, (one.step_time_s, two.step_time_s))
    rows: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
        *([("time by sample", *each, duration)] if each is not None else []),
        ("step time", one.step_time_s, two.step_time_s, duration),
        *_both(time_parts(one), time_parts(two), duration),
        ("lower bound", one.lower_bound_s, two.lower_bound_s, duration),
        ("tokens/s", one.tokens_per_s, two.tokens_per_s, count),
        ("memory", one.memory_bytes.total, two.memory_bytes.total, size),
        *_both(one.memory_bytes.parts(), two.memory_bytes.parts(), size),
    ]
    return [
        (what, show(before), show(after), _relative(before, after))
        for what, before, after, show in rows
        if before is not None and after is not None and (before or after)
    ]


def _both(
    before: Mapping[str, float], after: Mapping[str, float], show: Callable[[float], str]
) -> Iterator[tuple[str, float, float, Callable[[float], str]]]:
    for name in dict.fromkeys([*before, *after]):
        yield f"  {name}", before.get(name, 0), after.get(name, 0), show


def gap(a: Plan, b: Plan) -> list[str]:
    """Why a step of ``b`` takes more or less time and memory than one of ``a``."""
    one, two = a.prediction, b.prediction
    sizes = one.memory_bytes.parts(), two.memory_bytes.parts()
    return reasons((time_parts(one), time_parts(two)), sizes)


def diff_object(
    a: Plan, b: Plan, clusters: Clusters = (None, None), batches: Batches = (None, None)
) -> dict[str, object]:
    """What ``autopar diff --json`` prints."""
    one, two = a.prediction, b.prediction
    return {
        "decisions": {c.what: [c.before, c.after] for c in decisions(a, b, clusters, batches)},
        "strategies": {c.what: [c.before, c.after] for c in strategies(a, b)},
        "global_batch": [samples_of(batch) for batch in batches],
        "step_time_s": [one.step_time_s, two.step_time_s],
        "time_parts_s": [time_parts(one), time_parts(two)],
        "memory_bytes": [one.memory_bytes.total, two.memory_bytes.total],
        "memory_parts_bytes": [one.memory_bytes.parts(), two.memory_bytes.parts()],
        "because": gap(a, b),
    }


def diff(
    a: Plan,
    b: Plan,
    names: tuple[str, str] = ("a", "b"),
    clusters: Clusters = (None, None),
    batches: Batches = (None, None),
) -> list[RenderableType]:
    """Tables of everything that differs; one sentence when nothing does, one when steps are of
    other batches."""
    chosen, moved = decisions(a, b, clusters, batches), strategies(a, b)
    parts: list[RenderableType] = []
    if not chosen and not moved:
        parts.append(Text("Both plans decide the same.", style="bold"))
    for title, changes in (("Decisions", chosen), ("Strategies", moved)):
        if changes:
            rows = table("", *names)
            for change in changes:
                rows.add_row(change.what, change.before, change.after)
            parts += [Text(f"{title} ({len(changes)} differ)", style="bold"), indented(rows)]
    rows = table("", *names, "change", right=(*names, "change"))
    for row in costs(a, b, batches):
        rows.add_row(*row)
    parts += [Text("Predicted", style="bold"), indented(rows)]
    if apart := not_alike(batches, names):
        parts.append(Text(f"  {apart}.", style="yellow"))
    return [*parts, *(Text(f"  {names[1]}: {why}") for why in gap(a, b))]


def _changes(before: Mapping[str, str], after: Mapping[str, str], absent: str) -> Iterator[Change]:
    for what in dict.fromkeys([*before, *after]):
        one, two = before.get(what, absent), after.get(what, absent)
        if one != two:
            yield Change(what, one, two)


def _relative(before: float, after: float) -> str:
    if before == after:
        return "same"
    if not before:
        return "new"
    return f"{'+' if after > before else '-'}{percent(abs(after / before - 1))}"
