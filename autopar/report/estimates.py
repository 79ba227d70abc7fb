"""What `autopar estimate` prints of a layout priced alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from autopar.cost_models.footprint import Footprint
from autopar.cost_models.provenance import family_origins, summary
from autopar.planner.estimate import Estimate


def render(found: Estimate) -> str:
    """The report as plain text."""
    x, gib = found.layout, 2.0**30
    lines = [
        f"{found.arch.name}: {_count(found.arch.parameters)} parameters on "
        f"{x.device_count} {found.device.name} ({found.cluster}), {found.precision}, {found.style}",
        f"layout   {x}",
        f"step     {found.step_time_s:.3g} s  (band {found.time_band_s[0]:.3g} to "
        f"{found.time_band_s[1]:.3g})   {found.tokens_per_s:,.0f} tokens/s   "
        f"{found.tokens_per_s / x.device_count:,.0f} per device   MFU {found.mfu:.1%}",
        "",
        "where the time goes",
    ]
    for name, seconds in asdict(found.parts).items():
        if name != "total_s" and abs(float(seconds)) > 1e-9:
            label = name.removesuffix("_s").replace("_", " ")
            share = float(seconds) / found.step_time_s
            lines.append(f"  {label:16s} {float(seconds):10.4g} s {share:6.1%}")
    low, high = found.memory.band
    lines += [
        "",
        f"peak memory of stage {found.memory.stage} at {found.memory.moment}",
    ]
    for name, size in found.memory.parts():
        lines.append(f"  {name:16s} {size / gib:10.2f} GiB")
    lines += [
        f"  {'total':16s} {found.memory.total / gib:10.2f} GiB  (band {low / gib:.1f} to "
        f"{high / gib:.1f}) of {found.memory_limit_bytes / gib:.1f} GiB",
        f"  of it {found.memory.allocated / gib:.2f} GiB allocated, "
        f"{found.memory.reserved / gib:.2f} GiB reserved; most for {_largest(found.memory)}",
        "",
    ]
    if found.fits:
        lines.append("fits" if high <= found.memory_limit_bytes else "fits, but the band does not")
    else:
        short = (found.memory.total - found.memory_limit_bytes) / gib
        lines.append(f"does not fit: {short:.1f} GiB short on {found.device.name}; {found.advice}")
    origins = summary(family_origins(found.device.family))
    lines.append(f"constants of the time: {origins} (cost_models/fitted.yaml)")
    return "\n".join(lines)


def _count(parameters: int) -> str:
    """``70.6 B`` or ``0.9 M``"""
    if parameters >= 1e8:
        return f"{parameters / 1e9:.1f} B"
    return f"{parameters / 1e6:.1f} M"


def _largest(memory: Footprint) -> str:
    """The names of the three largest parts."""
    return ", ".join(name for name, _ in sorted(memory.parts(), key=lambda part: -part[1])[:3])


def to_json(found: Estimate) -> str:
    """The report as one JSON object."""
    return json.dumps(to_object(found), indent=1)


def to_object(found: Estimate) -> dict[str, Any]:
    """What `to_json` writes."""
    return {
        "step_time_s": found.step_time_s,
        "step_time_band_s": list(found.time_band_s),
        "tokens_per_s": found.tokens_per_s,
        "mfu": found.mfu,
        "layout": str(found.layout),
        "style": found.style,
        "time_s": {k: float(v) for k, v in asdict(found.parts).items()},
        "memory_bytes": {
            **dict(found.memory.parts()),
            "total": found.memory.total,
            "allocated": found.memory.allocated,
            "reserved": found.memory.reserved,
            "band": list(found.memory.band),
            "limit": found.memory_limit_bytes,
            "stage": found.memory.stage,
            "moment": found.memory.moment,
        },
        "fits": found.fits,
        "advice": found.advice,
    }
