"""What `autopar estimate` prints of a layout priced alone."""

from __future__ import annotations

import json
from typing import Any

from autopar.cost_models.provenance import family_origins, summary
from autopar.nouns.prediction import Memory
from autopar.planner.family.estimate import Estimate
from autopar.report.units import duration, percent, size


def render(estimate: Estimate) -> str:
    """The report as plain text."""
    x = estimate.layout
    lines = [
        f"{estimate.arch.name}: {_count(estimate.arch.parameters)} parameters on "
        f"{x.device_count} {estimate.device.name} ({estimate.cluster}), {estimate.precision}, "
        f"{estimate.style}",
        f"layout   {x}",
        f"step     {duration(estimate.step_time_s)}  (band {duration(estimate.time_band_s[0])} to "
        f"{duration(estimate.time_band_s[1])})   {estimate.tokens_per_s:,.0f} tokens/s   "
        f"{estimate.tokens_per_s / x.device_count:,.0f} per device   MFU {percent(estimate.mfu)}",
        "",
        "where the time goes",
    ]
    for name, seconds in estimate.parts_s.items():
        if abs(seconds) > 1e-9:
            share = seconds / estimate.step_time_s
            lines.append(f"  {name:16s} {duration(seconds):>10s} {percent(share):>8s}")
    low, high = estimate.memory_band
    lines += ["", f"peak memory of rank {estimate.rank}"]
    for name, used in estimate.memory.parts().items():
        lines.append(f"  {name:16s} {size(used):>10s}")
    lines += [
        f"  {'total':16s} {size(estimate.memory.total):>10s}  (band {size(low)} to {size(high)}) "
        f"of {size(estimate.memory_limit_bytes)}",
        f"  of it {size(estimate.memory.allocated)} allocated, "
        f"{size(estimate.memory.allocated + estimate.memory.reserved)} reserved; "
        f"most for {_largest(estimate.memory)}",
        "",
    ]
    if estimate.fits:
        lines.append(
            "fits" if high <= estimate.memory_limit_bytes else "fits, but the band does not"
        )
    else:
        short = size(estimate.memory.total - estimate.memory_limit_bytes)
        lines.append(f"does not fit: {short} short on {estimate.device.name}; {estimate.advice}")
    lines.append("layers: read off the model's graph, op by op")
    origins = summary(family_origins(estimate.device.family))
    lines.append(f"constants of the time: {origins} (cost_models/fitted.yaml)")
    return "\n".join(lines)


def _count(parameters: int) -> str:
    """``70.6 B`` or ``0.9 M``"""
    if parameters >= 1e8:
        return f"{parameters / 1e9:.1f} B"
    return f"{parameters / 1e6:.1f} M"


def _largest(memory: Memory) -> str:
    """The names of the three largest parts."""
    return ", ".join(
        name for name, _ in sorted(memory.parts().items(), key=lambda part: -part[1])[:3]
    )


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
        "time_s": {"total": estimate.step_time_s, **estimate.parts_s},
        "memory_bytes": {
            **estimate.memory.parts(),
            "total": estimate.memory.total,
            "allocated": estimate.memory.allocated,
            "band": list(estimate.memory_band),
            "limit": estimate.memory_limit_bytes,
            "rank": estimate.rank,
        },
        "fits": estimate.fits,
        "advice": estimate.advice,
    }
