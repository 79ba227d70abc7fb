"""What would fit in place of a layout that does not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.cost_models.software import Software
from autopar.frontends.family.arch import Arch
from autopar.nouns.axes import CONTEXT, EXPERT, PIPELINE, SHARD, TENSOR
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout, Pins
from autopar.nouns.style import Style
from autopar.planner.family.legal import illegal
from autopar.planner.family.pins import RECOMPUTES
from autopar.planner.family.runs import peak_bytes, run_on, step_s
from autopar.planner.family.sweep import sweep


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
            run = run_on(arch, cluster, other, precision, style, declared)
            if peak_bytes(run) > cluster.memory_bytes:
                continue
            seconds = step_s(run)
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
