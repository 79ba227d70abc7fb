"""Layouts of the transformer family priced one after the other: a sweep, and what would fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.cost_models.family import Arch
from autopar.cost_models.footprint import Footprint, footprint
from autopar.cost_models.rates import rates_of
from autopar.cost_models.software import Software, default_software
from autopar.cost_models.step_time import Rates, StepTime, stacked_rates, step_time
from autopar.cost_models.work import Work, stacked, work_of
from autopar.nouns.axes import CONTEXT, EXPERT, PIPELINE, SHARD, TENSOR
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout, Pins
from autopar.nouns.style import Style
from autopar.planner.family.graph_figures import figures_of
from autopar.planner.family.legal import illegal
from autopar.planner.family.pins import RECOMPUTES


def software_for(cluster: Cluster, layout: Layout, style: Style | None = None) -> Software:
    """What is usual on the cluster's devices, executed in ``style`` where that is given."""
    device = cluster.device
    usual = default_software(device.family, device.kind, layout.zero)
    return usual if style is None else replace(usual, style=style)


def time_of(
    arch: Arch, cluster: Cluster, layout: Layout, software: Software, precision: str
) -> StepTime:
    """Seconds of one legal layout, by part."""
    rates = rates_of(cluster.device, precision, software, arch.dim)
    return step_time(work_for(arch, cluster, layout, software, precision), rates)


def work_for(
    arch: Arch, cluster: Cluster, layout: Layout, software: Software, precision: str
) -> Work:
    """What the busiest rank does; its layers as the model's graph has them."""
    layer = figures_of(arch, layout, software, precision).layer
    return work_of(arch, layout, cluster, software, precision, layer=layer)


def memory_of(arch: Arch, layout: Layout, software: Software, precision: str) -> Footprint:
    """Peak memory of one legal layout, as the devices see it."""
    return footprint_of(arch, layout, replace(software, memory="device"), precision)


def footprint_of(arch: Arch, layout: Layout, software: Software, precision: str) -> Footprint:
    """Peak memory as ``software`` counts it; what a layer keeps is that of the model's graph."""
    kept = figures_of(arch, layout, software, precision).kept
    return footprint(arch, layout, software, precision, kept)


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
    staged = (
        replace(
            layout,
            interleave=interleave,
            schedule="interleaved-1f1b" if interleave > 1 else "1f1b",
        )
        for interleave in ((1, 2, 4) if layout.pp > 1 else (1,))
    )
    # Under these schedules neither recompute nor state sharding breaks a rule.
    legal = [one for one in staged if not illegal(arch, one, count)]
    for recompute in RECOMPUTES if legal else ():
        for zero in (0, 1, 2, 3):
            for one in legal:
                yield replace(one, recompute=recompute, zero=zero)


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
    software = software or software_for(cluster, layout, style)
    seconds = float(time_of(arch, cluster, layout, software, precision).total_s)
    return seconds, memory_of(arch, layout, software, precision).total


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
    candidates = layouts(arch, cluster, global_batch)
    return fitting(arch, cluster, candidates, precision, keep, style, software)


def fitting(
    arch: Arch,
    cluster: Cluster,
    candidates: Iterable[Layout],
    precision: str = "bf16",
    keep: int = 10,
    style: Style | None = None,
    software: Software | None = None,
) -> list[tuple[float, float, Layout]]:
    """Of legal layouts the `keep` fastest that fit, as `sweep` gives them."""
    fits: list[tuple[float, Layout]] = []
    works: list[Work] = []
    rates: list[Rates] = []
    for layout in candidates:
        held = software or software_for(cluster, layout, style)
        peak = memory_of(arch, layout, held, precision).total
        if peak <= cluster.memory_bytes:
            fits.append((peak, layout))
            works.append(work_for(arch, cluster, layout, held, precision))
            rates.append(rates_of(cluster.device, precision, held, arch.dim))
    if not fits:
        return []
    seconds = step_time(stacked(works), stacked_rates(rates)).total_s.tolist()
    rows = [(time_s, peak, layout) for time_s, (peak, layout) in zip(seconds, fits, strict=True)]
    return sorted(rows, key=_least_split)[:keep]


def _least_split(row: tuple[float, float, Layout]) -> tuple[float, int, float]:
    """Fastest first; between equals the one with fewest model ranks."""
    seconds, peak, x = row
    return seconds, x.tp * x.cp * x.ep * x.pp, peak


def cheapest_change(
    arch: Arch,
    cluster: Cluster,
    layout: Layout,
    style: Style,
    precision: str,
    declared: Software | None,
) -> str:
    """The change of fewest choices that fits and costs least time, in `--fix` words. What leaves
    the degrees as they are, such as recomputation, is said first however many choices it takes,
    and other degrees beside it where they are faster; other degrees alone, with one choice more
    where need be, only where nothing else fits."""

    def fastest(changes: Sequence[Mapping[str, Any]]) -> tuple[float, Mapping[str, Any]] | None:
        best = None
        for change in changes:
            other = replace(layout, **change)
            if illegal(arch, other, cluster.device_count):
                continue
            other_software = declared or software_for(cluster, other, style)
            if memory_of(arch, other, other_software, precision).total > cluster.memory_bytes:
                continue
            seconds = float(time_of(arch, cluster, other, other_software, precision).total_s)
            if best is None or seconds < best[0]:
                best = seconds, change
        return best

    def words(seconds: float, change: Mapping[str, Any]) -> str:
        fix = replace(layout, **change).shortest()
        return f"{Pins(**change)} fits, at {seconds:.3g} s a step: --fix {fix}"

    same, other = _same_degrees(layout), _other_degrees(arch, layout)
    fewest = (fastest(_together(same, count)) for count in range(1, len(_names(same)) + 1))
    near, far = next((one for one in fewest if one is not None), None), fastest(other)
    if near is not None:
        return words(*near) + (f"; {words(*far)}" if far is not None and far[0] < near[0] else "")
    best = far or fastest(_together([*same, *other], 2))
    if best is not None:
        return words(*best)
    return _fastest_that_fits(arch, cluster, layout.global_batch, precision, style, declared)


def _names(changes: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(name for change in changes for name in change)


def _together(changes: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Every ``count`` of the changes that are of different choices, as one change each."""
    return [
        dict(pair for change in some for pair in change.items())
        for some in itertools.combinations(changes, count)
        if len(_names(some)) == sum(map(len, some))
    ]


def _same_degrees(layout: Layout) -> list[dict[str, Any]]:
    """Changes of one choice that leave every device where it is."""
    changes: list[dict[str, Any]] = []
    more = RECOMPUTES[RECOMPUTES.index(layout.recompute) + 1 :]
    changes += [{"recompute": recompute} for recompute in more]
    if layout.microbatch > 1:
        changes.append({"microbatch": 1})
    if layout.schedule == "gpipe":
        changes.append({"schedule": "1f1b"})
    if layout.tp > 1 and not layout.sequence_parallel:
        changes.append({"sequence_parallel": True})
    return changes + [{"zero": zero} for zero in range(layout.zero + 1, 4)]


def _other_degrees(arch: Arch, layout: Layout) -> list[dict[str, Any]]:
    """Changes that take devices from ``dp_shard`` for another axis."""
    changes: list[dict[str, Any]] = []
    for name in (TENSOR, PIPELINE, CONTEXT):
        for times in (2, 4, 8):
            degree = getattr(layout, name) * times
            if layout.dp_shard % times == 0 and (name != TENSOR or degree <= 8):
                changes.append({name: degree, SHARD: layout.dp_shard // times})
    return changes + [{EXPERT: layout.ep * times} for times in (2, 4, 8) if arch.is_moe]


def _fastest_that_fits(
    arch: Arch,
    cluster: Cluster,
    global_batch: int,
    precision: str,
    style: Style,
    declared: Software | None,
) -> str:
    """A layout from anywhere, where none near by fits."""
    anywhere = sweep(arch, cluster, global_batch, precision, 1, style, declared)
    if not anywhere:
        return (
            f"no layout of {cluster.device_count} devices fits, with full recompute and ZeRO 3 "
            "either; more devices, or larger ones, are needed"
        )
    seconds, _, other = anywhere[0]
    return (
        f"no change of one or two choices fits; --fix {other.shortest()} does, at "
        f"{seconds:.3g} s a step"
    )
