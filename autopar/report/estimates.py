"""What `autopar estimate` prints of a layout priced alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from autopar.cost_models.footprint import Footprint
from autopar.cost_models.provenance import family_origins, summary
from autopar.planner.estimate import Estimate


def render(estimate: Estimate) -> str:
    """The report as plain text."""
    x, gib = estimate.layout, 2.0**30
    lines = [
        f"{estimate.arch.name}: {_count(estimate.arch.parameters)} parameters on "
        f"{x.device_count} {estimate.device.name} ({estimate.cluster}), {estimate.precision}, "
        f"{estimate.style}",
        f"layout   {x}",
        f"step     {estimate.step_time_s:.3g} s  (band {estimate.time_band_s[0]:.3g} to "
        f"{estimate.time_band_s[1]:.3g})   {estimate.tokens_per_s:,.0f} tokens/s   "
        f"{estimate.tokens_per_s / x.device_count:,.0f} per device   MFU {estimate.mfu:.1%}",
        "",
        "where the time goes",
    ]
    for name, seconds in asdict(estimate.parts).items():
        if name != "total_s" and abs(float(seconds)) > 1e-9:
            label = name.removesuffix("_s").replace("_", " ")
            share = float(seconds) / estimate.step_time_s
            lines.append(f"  {label:16s} {float(seconds):10.4g} s {share:6.1%}")
    low, high = estimate.memory.band
    lines += [
        "",
        f"peak memory of rank {estimate.memory.rank} at {estimate.memory.moment}",
    ]
    for name, size in estimate.memory.parts():
        lines.append(f"  {name:16s} {size / gib:10.2f} GiB")
    lines += [
        f"  {'total':16s} {estimate.memory.total / gib:10.2f} GiB  (band {low / gib:.1f} to "
        f"{high / gib:.1f}) of {estimate.memory_limit_bytes / gib:.1f} GiB",
        f"  of it {estimate.memory.allocated / gib:.2f} GiB allocated, "
        f"{estimate.memory.reserved / gib:.2f} GiB reserved; most for {_largest(estimate.memory)}",
        "",
    ]
    if estimate.fits:
        lines.append(
            "fits" if high <= estimate.memory_limit_bytes else "fits, but the band does not"
        )
    else:
        short = (estimate.memory.total - estimate.memory_limit_bytes) / gib
        lines.append(
            f"does not fit: {short:.1f} GiB short on {estimate.device.name}; {estimate.advice}"
        )
    lines.append(f"layers: {priced_by(estimate)}")
    origins = summary(family_origins(estimate.device.family))
    lines.append(f"constants of the time: {origins} (cost_models/fitted.yaml)")
    return "\n".join(lines)


def priced_by(estimate: Estimate) -> str:
    """Where the figures of a layer are from."""
    if estimate.formulas_for:
        return f"by the older formulas of the family, since no graph says {estimate.formulas_for}"
    return "read off the model's graph, op by op"


def _count(parameters: int) -> str:
    """``70.6 B`` or ``0.9 M``"""
    if parameters >= 1e8:
        return f"{parameters / 1e9:.1f} B"
    return f"{parameters / 1e6:.1f} M"


def _largest(memory: Footprint) -> str:
    """The names of the three largest parts."""
    return ", ".join(name for name, _ in sorted(memory.parts(), key=lambda part: -part[1])[:3])


def to_json(estimate: Estimate) -> str:
    """The report as one JSON object."""
    return json.dumps(to_object(estimate), indent=1)


def to_object(estimate: Estimate) -> dict[str, Any]:
    """What `to_json` writes."""
    return {
        "step_time_s": estimate.step_time_s,
        "step_time_band_s": list(estimate.time_band_s),
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "layout": str(estimate.layout),
        "style": estimate.style,
        "layers": priced_by(estimate),
        "time_s": {k: float(v) for k, v in asdict(estimate.parts).items()},
        "memory_bytes": {
            **dict(estimate.memory.parts()),
            "total": estimate.memory.total,
            "allocated": estimate.memory.allocated,
            "reserved": estimate.memory.reserved,
            "band": list(estimate.memory.band),
            "limit": estimate.memory_limit_bytes,
            "rank": estimate.memory.rank,
            "moment": estimate.memory.moment,
        },
        "fits": estimate.fits,
        "advice": estimate.advice,
    }
