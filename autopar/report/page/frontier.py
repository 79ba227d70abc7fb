"""The plan and those that lost: time against memory, with the limit and who beats whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.nouns.offload import OFFLOAD
from autopar.nouns.plan import Plan
from autopar.report.page.html import Markup, joined, section, table, tag
from autopar.report.units import degrees, duration, size

NEAR = 0.3
"""Share of the limit below which a plot leaves the limit out."""


@dataclass(frozen=True, slots=True)
class Point:
    """One layout; ``label`` is its number, the plan's own is 1."""

    label: str
    step_time_s: float
    memory_bytes: float


def points(plan: Plan) -> list[Point]:
    """The plan first, then runners-up whose memory is known."""
    own = Point("1", plan.prediction.step_time_s, plan.prediction.memory_bytes.total)
    return [own] + [
        Point(str(i), lost.step_time_s, lost.memory_bytes)
        for i, lost in enumerate(plan.runners_up, 2)
        if lost.memory_bytes
    ]


def frontier(of: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both time and memory, fastest first."""
    kept: list[Point] = []
    for point in sorted(of, key=lambda p: (p.step_time_s, p.memory_bytes)):
        if not kept or point.memory_bytes < kept[-1].memory_bytes:
            kept.append(point)
    return kept


def frontier_section(plan: Plan) -> Markup:
    rows: list[tuple[object, ...]] = [_own(plan)]
    for i, lost in enumerate(plan.runners_up, 2):
        choice = f"{degrees(lost.degrees)}, ZeRO {'any' if lost.zero is None else lost.zero}, "
        choice += f"recompute {lost.recompute or 'any'}, microbatches {lost.microbatches}"
        choice += "" if lost.offload == OFFLOAD[0] else f", offload {lost.offload}"
        held = size(lost.memory_bytes) if lost.memory_bytes else "-"
        why = tag("div", lost.reason, class_="soft")
        rows.append((str(i), duration(lost.step_time_s), held, joined((choice, why))))
    listed = table(("", "step", "memory", "layout, and why it lost"), rows, ("step", "memory"))
    if not plan.runners_up:
        return section("Plans that lost", tag("p", "No other layout was close.", class_="soft"))
    note = "Left is faster, lower needs less memory; the line joins those that none beats in both."
    return section("Plans that lost", _plot(points(plan), plan), listed, note=note)


def _own(plan: Plan) -> tuple[object, ...]:
    chosen = f"{degrees(plan.degrees)}, ZeRO {plan.each('zero')}, recompute "
    chosen += f"{plan.each('recompute')}, microbatches {plan.microbatches}"
    memory = plan.prediction.memory_bytes
    return (
        "1",
        duration(plan.prediction.step_time_s),
        size(memory.total),
        joined((chosen, tag("div", "this plan", class_="soft"))),
    )


def _range(sizes: Sequence[float], limit: float) -> tuple[float, float]:
    """(lowest, highest) of the plot: up to the limit, or where all are far below it around them."""
    most, least = max(sizes), min(sizes)
    if most >= NEAR * limit:
        return 0.0, 1.12 * max(limit, most)
    margin = 0.25 * (most - least) or 0.1 * most
    return max(0.0, least - margin), most + margin


def _plot(of: Sequence[Point], plan: Plan) -> Markup:
    limit = plan.prediction.memory_bytes.limit
    times = [p.step_time_s for p in of]
    low_s, high_s = min(times), max(times)
    wide_s = (high_s - low_s) or low_s
    low, top = _range([p.memory_bytes for p in of], limit)

    def x(step_s: float) -> float:
        return 8 + 84 * (step_s - low_s) / wide_s

    def y(held: float) -> float:
        return 100 * (top - held) / (top - low)

    line = " ".join(f"{x(p.step_time_s):.2f} {y(p.memory_bytes):.2f}" for p in frontier(of))
    shapes = [tag("path", d=f"M{line}")] if len(frontier(of)) > 1 else []
    far = limit > top
    if not far:
        at = f"{y(limit):.2f}"
        shapes.append(tag("line", class_="limit", x1=0, x2=100, y1=at, y2=at))
    drawing = tag("svg", *shapes, viewBox="0 0 100 100", preserveAspectRatio="none")
    dots = [
        tag(
            *("span", p.label),
            class_="dot c0 best" if p.label == "1" else "dot c4",
            style=f"left:{x(p.step_time_s):.2f}%;top:{y(p.memory_bytes):.2f}%",
            title=f"{duration(p.step_time_s)}, {size(p.memory_bytes)}",
        )
        for p in reversed(of)  # the plan's own above others
    ]
    place = 0 if far else y(limit)
    label = f"limit {size(limit)}{', far above' if far else ''}"
    labels = [
        tag("span", label, class_="at", style=f"right:.5rem;top:{place:.2f}%"),
        tag("span", size(top), class_="at", style="left:.5rem;top:0"),
        tag("span", size(low), class_="at", style="left:.5rem;bottom:0"),
    ]
    ends = tag("div", tag("span", duration(low_s)), tag("span", duration(high_s)), class_="ends")
    return joined([tag("div", drawing, *labels, *dots, class_="plot"), ends])
