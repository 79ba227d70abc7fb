"""The mesh on the cluster's levels, and what its collectives move on each of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.lowering.state import INSIDE
from autopar.nouns.axes import PIPELINE, TABLE
from autopar.nouns.cluster import Cluster
from autopar.nouns.level import Level
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan
from autopar.report.page.html import Markup, breaking, dotted, joined, section, table, tag
from autopar.report.units import duration, size


def level_of(cluster: Cluster, mesh: Mesh, axis: str) -> Level:
    """The outermost level that a collective over ``axis`` crosses; ``"a+b"`` is over both.

    Stages of a pipeline send to their neighbours alone. Inside domains nothing crosses what joins
    them.
    """
    names = axis.partition("/")[0].split("+")
    ways = 2 if axis == PIPELINE else math.prod(mesh.size(name) for name in names)
    span = ways * min(mesh.stride(name) for name in names)
    if axis.endswith(INSIDE):
        return [level for level in cluster.levels if level.span < span][-1]
    return next((level for level in cluster.levels if level.span >= span), cluster.levels[-1])


def mesh_section(plan: Plan, cluster: Cluster) -> Markup:
    """Axes and levels as bars over one scale of devices, each step twice as many."""
    mesh = plan.program_mesh
    whole = math.log2(max(2, cluster.device_count))

    def bar(first: int, end: int, colour: str) -> Markup:
        left, right = math.log2(first), math.log2(end)
        style = f"left:{100 * left / whole:.2f}%;width:{100 * (right - left) / whole:.2f}%"
        return tag("div", tag("i", class_=colour, style=style), class_="track")

    rows = []
    for axis in reversed(mesh.axes):
        stride, ways = mesh.stride(axis), mesh.size(axis)
        level = level_of(cluster, mesh, axis)
        text = f"over {level.name}: splits {TABLE[axis].splits}"
        name = tag("span", tag("b", breaking(axis)), f" {ways}")
        bars = bar(stride, stride * ways, "c0")
        rows.append(tag("div", name, bars, tag("span", text, class_="soft"), class_="row"))
    inner = 1
    for level in cluster.levels:
        text = f"{level.span} devices, {_rate(level)}, {duration(level.latency_s)}"
        bars = bar(inner, max(level.span, inner), "c4")
        rows.append(
            tag(
                "div", tag("span", level.name), bars, tag("span", text, class_="soft"), class_="row"
            )
        )
        inner = max(level.span, inner)
    ends = tag(
        "div",
        tag("span"),
        tag("div", tag("span", "1 device"), tag("span", str(cluster.device_count)), class_="ends"),
        tag("span"),
        class_="row",
    )
    note = (
        "Blue: axes of the mesh, from their stride to the devices that one group reaches over. "
        "Grey: levels of the cluster. Each step to the right is twice as many devices."
    )
    return section("Mesh on the cluster", *rows, ends, note=note)


def _rate(level: Level) -> str:
    ports = f"{level.ports} x " if level.ports > 1 else ""
    return f"{ports}{level.bandwidth_bytes_per_s / 1e9:.4g} GB/s"


@dataclass(frozen=True, slots=True)
class LevelMoved:
    """Collectives of one kind over one axis in a step, on the pipeline rank that moves most."""

    level: str
    axis: str
    kind: str
    count: int
    size_bytes: int


def moved(
    plan: Plan, cluster: Cluster, collectives: Sequence[Mapping[str, Any]]
) -> list[LevelMoved]:
    """Innermost level first; of one level what moves most first."""
    mesh, totals = plan.program_mesh, _by_rank(collectives)
    busiest = max(totals, key=lambda rank: sum(b for _, b in totals[rank].values()), default=0)
    places = {level.name: i for i, level in enumerate(cluster.levels)}
    levels = [
        LevelMoved(level_of(cluster, mesh, axis).name, axis, kind, count, moved_bytes)
        for (axis, kind), (count, moved_bytes) in totals.get(busiest, {}).items()
    ]
    return sorted(levels, key=lambda one: (places[one.level], -one.size_bytes))


def _by_rank(
    rows: Sequence[Mapping[str, Any]],
) -> dict[int, dict[tuple[str, str], tuple[int, int]]]:
    by_rank: dict[int, dict[tuple[str, str], tuple[int, int]]] = defaultdict(dict)
    for row in rows:
        rank = by_rank[row.get("rank", 0)]
        count, moved_bytes = rank.get((row["axis"], row["kind"]), (0, 0))
        rank[row["axis"], row["kind"]] = (
            count + row["count"],
            moved_bytes + row["count"] * row["size_bytes"],
        )
    return by_rank


def moved_section(rows: Sequence[LevelMoved], stages: int) -> Markup:
    """Bars by level, then the table."""
    if not rows:
        return section("Collectives by level", tag("p", "Nothing is moved: there is one device."))
    by_level: dict[str, int] = defaultdict(int)
    for row in rows:
        by_level[row.level] += row.size_bytes
    most = max(by_level.values())
    where = "on the busiest pipeline rank" if stages > 1 else "of one rank"
    note = f"Bytes of a step, {where}: the full-size side of each collective."
    cells = [(r.level, r.axis, r.kind, f"{r.count:,}", size(r.size_bytes)) for r in rows]
    listed = [
        (level, dotted(f"{kind}({axis})"), count, total)
        for level, axis, kind, count, total in cells
    ]
    return section(
        "Collectives by level",
        joined(_bars(by_level, most)),
        table(("level", "what", "times", "bytes"), listed, ("times", "bytes")),
        note=note,
    )


def _bars(by_level: Mapping[str, int], most: int) -> Iterator[Markup]:
    for level, total in by_level.items():
        bar = tag("i", class_="c2", style=f"left:0;width:{100 * total / max(1, most):.2f}%")
        yield tag(
            "div",
            tag("span", level),
            tag("div", bar, class_="track"),
            tag("span", size(total), class_="soft"),
            class_="row",
        )
