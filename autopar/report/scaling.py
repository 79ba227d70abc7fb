"""What `autopar estimate` prints of layouts that it searched: the next ones, and the table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.nouns.layout import Layout
from autopar.planner.advice.scaling import BILLION, Asked, Scaled, Scaling, Searched
from autopar.report.estimates import to_object
from autopar.report.render import indented, table
from autopar.report.units import count, duration, percent, size

WIDTH = 200
"""Columns of these tables: what `--fix` takes stays one word."""


def fix_of(layout: Layout) -> str:
    """What `--fix` takes for it, but for the batch, which all layouts of a table share."""
    return str(layout.shortest().without("global_batch"))


def others(searched: Searched) -> list[RenderableType]:
    """The layouts that came next."""
    rows = table("step", "memory", "--fix", right=("step", "memory"))
    for seconds, peak, layout in searched.others:
        rows.add_row(duration(seconds), size(peak), fix_of(layout))
    assert searched.best is not None
    best = searched.best.layout
    title = (
        f"the fastest of {searched.count:,} layouts, all with --global-batch {best.global_batch}: "
        f"--fix {fix_of(best)}"
    )
    return [Text(title, style="bold"), *([indented(rows)] if searched.others else [])]


def others_object(searched: Searched) -> list[dict[str, Any]]:
    """The same for ``--json``."""
    return [
        {"step_time_s": seconds, "memory_bytes": peak, "fix": str(layout.shortest())}
        for seconds, peak, layout in searched.others
    ]


def scaling_table(asked: Asked, scaling: Scaling) -> list[RenderableType]:
    """A row for each number of devices, then the fewest that fit."""
    device = asked.cluster.device
    right = ("devices", "step", "efficiency", "MFU", "memory", "hours")
    rows = table(*right, "--fix", right=right)
    for row in scaling.rows:
        rows.add_row(str(row.devices), *_figures(scaling, row))
    batch = f"{scaling.global_batch:,} sequences of {asked.arch.seq:,} tokens"
    parts: list[RenderableType] = [
        Text(f"{asked.arch.name}: a batch of {batch} on {device.name}", style="bold"),
        indented(rows),
        Text("  efficiency: tokens a second and device, against the fewest devices that fit"),
        Text(f"  hours: of devices, for {count(BILLION)} tokens"),
    ]
    limit = size(asked.cluster.memory_bytes)
    parts.append(Text(f"  memory: of {limit}"))
    if grown := joined(asked, scaling.rows):
        parts.append(Text(f"  rows of more than {asked.cluster.device_count} devices{grown}"))
    return [*parts, *([Text(fewest)] if (fewest := _fewest(asked, scaling)) else [])]


def joined(asked: Asked, rows: Iterable[Scaled]) -> str:
    """By what devices are joined that the cluster does not have; empty: it has all of them."""
    if all(row.devices <= asked.cluster.device_count for row in rows):
        return ""
    return f", joined by {asked.cluster.levels[-1].name} too"


def _figures(scaling: Scaling, row: Scaled) -> tuple[str, ...]:
    one = row.estimate
    if one is None:
        return ("-", "-", "-", "-", "-", row.why)
    if not row.fits:
        return (duration(one.step_time_s), "-", "-", size(one.memory.total), "-", row.why)
    return (
        duration(one.step_time_s),
        percent(scaling.efficiency(row)),
        percent(one.mfu),
        size(one.memory.total),
        f"{row.device_hours_per_billion_tokens:,.3g}",
        fix_of(one.layout),
    )


def _fewest(asked: Asked, scaling: Scaling) -> str:
    least = scaling.fewest
    if least is None:
        return "" if any(row.fits for row in scaling.rows) else "none of them fits"
    assert least.estimate is not None
    step = duration(least.estimate.step_time_s)
    return (
        f"fewest devices that fit: {least.devices}{joined(asked, [least])}, at {step} a step: "
        f"--fix {fix_of(least.estimate.layout)}"
    )


def scaling_object(scaling: Scaling) -> dict[str, Any]:
    """The same for ``--json``."""
    return {
        "global_batch": scaling.global_batch,
        "rows": [_row(scaling, row) for row in scaling.rows],
        "fewest": None if scaling.fewest is None else scaling.fewest.devices,
    }


def _row(scaling: Scaling, row: Scaled) -> dict[str, Any]:
    one = row.estimate
    if one is None:
        return {"devices": row.devices, "fits": False, "why": row.why}
    return {
        "devices": row.devices,
        **to_object(one),
        "fix": str(one.layout.shortest()),
        "efficiency": scaling.efficiency(row) if row.fits else None,
        "device_hours_per_billion_tokens": row.device_hours_per_billion_tokens,
    }
