"""Every legal layout of a transformer on a cluster, and the fastest ones that fit."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.cost_models.software import Software
from autopar.frontends.family.arch import Arch
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.nouns.recompute import KEEP_ALL
from autopar.nouns.style import Style
from autopar.planner.family.legal import illegal
from autopar.planner.family.pins import RECOMPUTES
from autopar.planner.family.runs import peak_bytes, run_on, step_s


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
    """Of legal layouts the `keep` fastest that fit, as `sweep` gives them.

    What runs again (one of `RECOMPUTES`) costs time and saves memory: of layouts that differ in it
    alone the one that runs least again, of those that fit, stands for all.
    """
    rows: list[tuple[float, float, Layout]] = []
    fastest: list[float] = []
    alike: dict[Layout, list[Layout]] = {}
    for layout in candidates:
        alike.setdefault(replace(layout, recompute=KEEP_ALL), []).append(layout)
    for same in alike.values():
        same.sort(key=lambda layout: RECOMPUTES.index(layout.recompute))
        runs = [run_on(arch, cluster, x, precision, style, software) for x in same]
        if peak_bytes(runs[-1]) > cluster.memory_bytes:
            continue
        for run in runs:
            peak = peak_bytes(run)
            if peak <= cluster.memory_bytes:
                most_s = fastest[keep - 1] if len(fastest) >= keep else math.inf
                if (seconds := step_s(run, most_s)) <= most_s:
                    rows.append((seconds, peak, run.layout))
                    insort(fastest, seconds)
                break
    return sorted(rows, key=_least_split)[:keep]


def _least_split(row: tuple[float, float, Layout]) -> tuple[float, int, float]:
    """Fastest first; between equals the one with fewest model ranks."""
    seconds, peak, x = row
    return seconds, x.tp * x.cp * x.ep * x.pp, peak
