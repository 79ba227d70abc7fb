"""`autopar estimate --arch`: will it fit and how fast will it be, from a few architecture figures.

No model file and no framework is needed: `estimate` prices a layout of the transformer family on a
cluster, `render` shows it, `sweep` prices every legal layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autopar.arch_file import load_arch
from autopar.cluster_file import load_cluster
from autopar.cost_models.bands import time_band
from autopar.cost_models.family import Arch
from autopar.cost_models.footprint import Footprint, footprint
from autopar.cost_models.layout import (
    Layout,
    check_layout,
    illegal,
    layout_from_fix,
    parse_fix,
    rarely_named,
)
from autopar.cost_models.precision import compute_dtype, is_narrow
from autopar.cost_models.provenance import family_origins, summary
from autopar.cost_models.rates import rates_of
from autopar.cost_models.software import Software, default_software
from autopar.cost_models.step_time import StepTime, step_time
from autopar.cost_models.work import work_of
from autopar.errors import UserError
from autopar.nouns.cluster import Cluster, Device
from autopar.nouns.style import Style

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "fp4")


@dataclass(frozen=True)
class Estimate:
    """One layout priced: time and memory with their bands, and where both go."""

    arch: Arch
    layout: Layout
    cluster: str
    device: Device
    precision: str
    step_time_s: float
    time_band_s: tuple[float, float]
    tokens_per_s: float
    mfu: float
    style: Style
    parts: StepTime
    memory: Footprint
    memory_limit_bytes: int
    advice: str
    """The cheapest change that would fit, where it does not."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit_bytes


def estimate(
    arch: Arch,
    cluster: Cluster,
    layout: Layout,
    software: Software | None = None,
    precision: str = "bf16",
    style: Style | None = None,
) -> Estimate:
    """Price one layout; ``style`` takes the place of what is usual on the devices.

    A ``software`` that is given holds for the advice too, whatever state sharding that has.

    Raises:
        LayoutError: the layout is illegal; every broken rule with its numbers.
        UserError: an unknown precision, or one that the device does not compute in.
    """
    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision}: there are {', '.join(PRECISIONS)}")
    dtype, device = compute_dtype(precision), cluster.device
    if is_narrow(precision) and dtype not in dict(device.peak_flops_per_s):
        there = ", ".join(name for name, _ in device.peak_flops_per_s)
        raise UserError(f"--precision {precision}: {device.name} computes in {there}")
    check_layout(arch, layout, cluster.device_count)
    declared = software
    software = declared or _software(cluster, layout, style)
    parts = _time(arch, cluster, layout, software, precision)
    memory = _memory(arch, layout, software, precision)
    seconds = float(parts.total_s)
    tokens = layout.global_batch * arch.seq
    limit = cluster.memory_bytes
    advice = ""
    if memory.total > limit:
        advice = _cheapest_change(arch, cluster, layout, software.style, precision, declared)
    return Estimate(
        arch=arch,
        layout=layout,
        cluster=cluster.name,
        device=device,
        precision=precision,
        style=software.style,
        step_time_s=seconds,
        time_band_s=time_band(device.family, arch.is_moe).around(seconds),
        tokens_per_s=tokens / seconds,
        mfu=tokens
        * arch.flops_per_token()
        / (seconds * cluster.device_count * device.peak(precision)),
        parts=parts,
        memory=memory,
        memory_limit_bytes=limit,
        advice=advice,
    )


def _software(cluster: Cluster, layout: Layout, style: Style | None = None) -> Software:
    device = cluster.device
    usual = default_software(device.family, device.kind, layout.zero)
    return usual if style is None else replace(usual, style=style)


def _time(
    arch: Arch, cluster: Cluster, layout: Layout, software: Software, precision: str
) -> StepTime:
    rates = rates_of(cluster.device, precision, software, arch.dim, layout.schedule)
    return step_time(work_of(arch, layout, cluster, software, precision), rates)


def _memory(arch: Arch, layout: Layout, software: Software, precision: str) -> Footprint:
    return footprint(arch, layout, replace(software, memory="device"), precision)


def _cheapest_change(
    arch: Arch,
    cluster: Cluster,
    layout: Layout,
    style: Style,
    precision: str,
    declared: Software | None,
) -> str:
    """The change of one or two choices that fits and costs least time, in `--fix` words."""
    changes: list[dict[str, Any]] = []
    if layout.recompute != "full":
        changes += [{"recompute": "selective"}, {"recompute": "full"}]
    if layout.microbatch > 1:
        changes.append({"microbatch": 1})
    if layout.schedule == "gpipe":
        changes.append({"schedule": "1f1b"})
    changes += [{"zero": zero} for zero in range(layout.zero + 1, 4)]
    for tp in (2, 4, 8):
        if layout.dp_shard % tp == 0 and layout.tp * tp <= 8:
            changes.append({"tp": layout.tp * tp, "dp_shard": layout.dp_shard // tp})
    for pp in (2, 4, 8):
        if layout.dp_shard % pp == 0:
            changes.append({"pp": layout.pp * pp, "dp_shard": layout.dp_shard // pp})
    for cp in (2, 4, 8):
        if layout.dp_shard % cp == 0:
            changes.append({"cp": layout.cp * cp, "dp_shard": layout.dp_shard // cp})
    if arch.is_moe:
        changes += [{"ep": layout.ep * times} for times in (2, 4, 8)]
    pairs = [
        {**a, **b} for i, a in enumerate(changes) for b in changes[i + 1 :] if not set(a) & set(b)
    ]
    best: tuple[float, dict[str, Any]] | None = None
    for group in (changes, pairs):
        for change in group:
            other = replace(layout, **change)
            if illegal(arch, other, cluster.device_count):
                continue
            other_software = declared or _software(cluster, other, style)
            if _memory(arch, other, other_software, precision).total > cluster.memory_bytes:
                continue
            seconds = float(_time(arch, cluster, other, other_software, precision).total_s)
            if best is None or seconds < best[0]:
                best = seconds, change
        if best is not None:
            change_text = ",".join(f"{name}={value}" for name, value in best[1].items())
            typed = _typed(replace(layout, **best[1])) + rarely_named(layout)
            return f"{change_text} fits, at {best[0]:.3g} s a step: --fix {typed}"
    return _fastest_that_fits(arch, cluster, layout.global_batch, precision, style, declared)


def _fastest_that_fits(
    arch: Arch,
    cluster: Cluster,
    global_batch: int,
    precision: str,
    style: Style,
    declared: Software | None,
) -> str:
    """A layout from anywhere, where none near by fits."""
    found = sweep(arch, cluster, global_batch, precision, 1, style, declared)
    if not found:
        return (
            f"no layout of {cluster.device_count} devices fits, with full recompute and ZeRO 3 "
            "either; more devices, or larger ones, are needed"
        )
    seconds, _, other = found[0]
    return (
        f"no change of one or two choices fits; --fix {_typed(other)} does, at "
        f"{seconds:.3g} s a step"
    )


def _typed(layout: Layout) -> str:
    """What `--fix` takes for this layout: what is usual is left out, but not what depends on the
    degrees."""
    usual = Layout(layout.global_batch)
    names = (
        *("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "zero", "global_batch"),
        *("microbatch", "schedule", "interleave", "recompute"),
    )
    words = [
        f"{name}={getattr(layout, name)}"
        for name in names
        if name in ("zero", "global_batch") or getattr(layout, name) != getattr(usual, name)
    ]
    return ",".join([*words, *(["sequence_parallel=off"] if not layout.sequence_parallel else [])])


def layouts(arch: Arch, cluster: Cluster, global_batch: int) -> Iterator[Layout]:
    """Every legal layout over the usual degrees, microbatches, recompute and state sharding."""
    count = cluster.device_count
    for tp in _divisors(count, 64):
        for pp in _divisors(count // tp, arch.layers):
            for cp in _divisors(count // (tp * pp), 16):
                dp = count // (tp * pp * cp)
                for ep in _divisors(tp * cp * dp, max(1, arch.experts)):
                    for microbatch in (1, 2, 4, 8):
                        yield from _variants(
                            arch, count, Layout(global_batch, microbatch, 1, dp, tp, cp, ep, pp)
                        )


def _variants(arch: Arch, count: int, layout: Layout) -> Iterator[Layout]:
    for recompute in ("none", "selective", "full"):
        for zero in (0, 1, 2, 3):
            for interleave in (1, 2, 4) if layout.pp > 1 else (1,):
                one = replace(
                    layout,
                    recompute=recompute,
                    zero=zero,
                    interleave=interleave,
                    schedule="interleaved" if interleave > 1 else "1f1b",
                )
                if not illegal(arch, one, count):
                    yield one


def _divisors(number: int, limit: int) -> list[int]:
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def price(
    arch: Arch,
    cluster: Cluster,
    layout: Layout,
    precision: str = "bf16",
    style: Style | None = None,
    software: Software | None = None,
) -> tuple[float, float]:
    """(step seconds, peak bytes) of one legal layout: the quick form of `estimate`."""
    software = software or _software(cluster, layout, style)
    seconds = float(_time(arch, cluster, layout, software, precision).total_s)
    return seconds, _memory(arch, layout, software, precision).total


def sweep(
    arch: Arch,
    cluster: Cluster,
    global_batch: int,
    precision: str = "bf16",
    keep: int = 10,
    style: Style | None = None,
    software: Software | None = None,
) -> list[tuple[float, float, Layout]]:
    """The `keep` fastest layouts that fit: (step seconds, peak bytes, layout), fastest first."""
    found = []
    for layout in layouts(arch, cluster, global_batch):
        seconds, peak = price(arch, cluster, layout, precision, style, software)
        if peak <= cluster.memory_bytes:
            found.append((seconds, peak, layout))
    return sorted(found, key=_least_split)[:keep]


def _least_split(row: tuple[float, float, Layout]) -> tuple[float, int, float]:
    """Fastest first; between equals the one with fewest model ranks."""
    seconds, peak, x = row
    return seconds, x.tp * x.cp * x.ep * x.pp, peak


def estimate_files(
    arch_path: str | Path,
    cluster_path: str | Path,
    fix: str = "",
    global_batch: int | None = None,
    precision: str = "bf16",
    style: Style | None = None,
) -> Estimate:
    """What `autopar estimate` computes, from the paths and texts that it was given.

    Raises:
        UserError: any of the inputs cannot be used.
    """
    if global_batch is not None and global_batch < 1:
        raise UserError(f"--global-batch {global_batch}: give a whole number of sequences from 1")
    arch, cluster = load_arch(arch_path), load_cluster(cluster_path)
    choices = parse_fix(fix)
    if global_batch is None and "global_batch" not in choices:
        degrees = [int(choices.get(name, 1)) for name in ("tp", "cp", "pp")]
        replicas = max(1, cluster.device_count // (degrees[0] * degrees[1] * degrees[2]))
        microbatches = int(choices.get("microbatches", 4 * degrees[2]))
        global_batch = replicas * int(choices.get("microbatch", 1)) * microbatches
    layout = layout_from_fix(choices, cluster.device_count, global_batch)
    return estimate(arch, cluster, layout, precision=precision, style=style)


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
