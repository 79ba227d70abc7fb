"""What each rank does and holds over a step: the schedule's timeline with memory under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.nouns.prediction import Prediction
from autopar.pipeline.play import Span, memory
from autopar.pipeline.trace import NAMES
from autopar.pricing.planned import PricedPipeline
from autopar.pricing.stage_time import stage_time
from autopar.report.page.frontier import NEAR
from autopar.report.page.html import Markup, dotted, section, table, tag
from autopar.report.pipeline import pipeline_object
from autopar.report.units import duration, percent, size

WIDTH = 10_000
"""Units that a step is wide."""
FEW_SPANS, MOST_SPANS = 600, 6_000
"""Up to the first every action says what it is; beyond the second the first ones are drawn."""
MOST_CURVES = 8
MOST_POINTS = 1_500
"""Of units times microbatches: up to so many, all of a step are drawn, else the first."""
MOST_MICROBATCHES = 4
COLOUR = {"F": "c0", "B": "c1", "I": "c3", "W": "c2"}
Curve = Sequence[tuple[float, float]]
"""(seconds, bytes)."""


def over_time_section(priced: PricedPipeline, predicted: Prediction) -> Markup:
    if len(priced.schedule.lists) > 1:
        return _pipeline(priced, predicted.step_time_s)
    curve, count = stage_curve(priced, predicted)
    (held,) = priced.prices.memory(priced.runs, priced.schedule)
    state = held.total - held.activations
    limit, step_s = priced.prices.cluster.device.memory_bytes, predicted.step_time_s
    microbatches = priced.schedule.microbatches
    whole = count == microbatches
    end_s = step_s if whole else curve[-1][0]
    shown = (
        "a step"
        if whole
        else f"the first {count} of {microbatches} microbatches of a step of {duration(step_s)}"
    )
    note = (
        f"Memory over {shown}: {size(state)} of state and buffers stay; what backward needs grows "
        "in forward and goes in backward"
        f"{', and the optimizer comes last' if whole else ''}. The device has {size(limit)} "
        "(dashed, where near)."
    )
    points = [(t, state + kept) for t, kept in curve]
    chart = _curve([*points, (end_s, points[-1][1])], end_s, limit, "tall")
    return section("Memory over time", chart, _ends(end_s), note=note)


def _ends(end_s: float) -> Markup:
    """The axis under a drawing: from 0 to what its right side is."""
    return tag("div", tag("span", "0"), tag("span", duration(end_s)), class_="ends")


def stage_curve(priced: PricedPipeline, predicted: Prediction) -> tuple[Curve, int]:
    """What one stage keeps for backward as it goes through its units, and of how many microbatches.

    A unit keeps its own from the end of its forward to that of its backward. Units have the shares
    of the predicted phases that their compute has of all compute, so that all microbatches end
    where the optimizer begins.
    """
    prices, called = priced.prices, 0
    units = []
    for i in range(len(prices.model.units)):
        summary = prices.model.stage_summary(i, i + 1)
        own = prices.recompute.within(called, len(summary.calls))
        time = stage_time(summary, prices.state, prices.cluster, own)
        units.append((time.forward_s, time.backward_s, summary.life(own).saved))
        called += len(summary.calls)
    every = priced.schedule.microbatches
    count = every if every * len(units) <= MOST_POINTS else min(every, MOST_MICROBATCHES)
    longer, slower = _stretched(
        sum(f for f, _, _ in units) * every, sum(b for _, b, _ in units) * every, predicted
    )
    now_s, kept = 0.0, 0.0
    curve = [(now_s, kept)]
    for _ in range(count):
        for forward_s, _, saved in units:
            now_s, kept = now_s + longer * forward_s, kept + saved
            curve.append((now_s, kept))
        for _, backward_s, saved in reversed(units):
            now_s, kept = now_s + slower * backward_s, kept - saved
            curve.append((now_s, kept))
    return curve, count


def _stretched(forward_s: float, backward_s: float, predicted: Prediction) -> tuple[float, float]:
    """By what forward and backward of all microbatches are longer than the compute of their units:
    communication that is not hidden lies between. Both alike where phases are not told."""
    if predicted.forward_time_s > 0 and forward_s > 0 and backward_s > 0:
        return predicted.forward_time_s / forward_s, predicted.backward_time_s / backward_s
    both = predicted.step_time_s / max(forward_s + backward_s, 1e-12)
    return both, both


def _pipeline(priced: PricedPipeline, step_s: float) -> Markup:
    spans = [s for s in priced.timeline.spans if s.stream == "compute"]
    drawn, end_s = spans, max(priced.timeline.step_s, step_s)
    note = f"{priced.schedule.name}: {percent(priced.timeline.bubble)} of the ranks' time is idle."
    if len(spans) > MOST_SPANS:
        drawn = sorted(spans, key=lambda s: s.start_s)[:MOST_SPANS]
        end_s = max(s.end_s for s in drawn)
        note += f" Drawn: the first {duration(end_s)} of a step of {duration(step_s)}."
    else:
        note += " Behind the last action ranks meet and the optimizer runs."
    saved = [priced.prices.saved_bytes(stage, *run) for stage, run in enumerate(priced.runs)]
    curves = memory(priced.timeline, lambda stage: saved[stage], lambda stage: 0.0)
    held = priced.prices.memory(priced.runs, priced.schedule)
    ranks = len(held)
    limits = " or ".join(map(size, sorted({memory.limit for memory in held})))
    fullest = max(range(ranks), key=lambda rank: held[rank].filled)
    curved = set(range(ranks)) if ranks <= MOST_CURVES else {0, fullest, ranks - 1}
    rows = []
    for rank in range(ranks):
        own = [s for s in drawn if s.rank == rank]
        peak = max(kept for _, kept in curves[rank])
        state = held[rank].total - peak
        parts = [_lane(own, end_s, len(drawn) <= FEW_SPANS)]
        if rank in curved:
            curve = [(t, state + kept) for t, kept in curves[rank] if t <= end_s]
            parts.append(_curve(_stepped(curve, end_s), end_s, held[rank].limit, "curve"))
        busy = percent(priced.timeline.busy_s[rank] / priced.timeline.step_s)
        text = f"busy {busy}, {size(held[rank].total)}"
        label = tag("span", f"rank {rank}")
        rows.append(
            tag("div", label, tag("div", *parts), tag("span", text, class_="soft"), class_="row")
        )
    kinds = {s.action.kind for s in drawn}
    key = [
        tag("li", tag("i", class_=f"key {COLOUR[kind]}"), tag("span", NAMES[kind]))
        for kind in COLOUR
        if kind in kinds
    ]
    note += f" Under each lane: its memory against its device's {limits} (dashed, where near)."
    return section(
        "Ranks over time",
        tag("ul", *key, class_="legend"),
        *rows,
        tag("div", tag("span"), _ends(end_s), class_="row"),
        _stages(priced),
        note=note,
    )


def _stages(priced: PricedPipeline) -> Markup:
    rows = [
        (
            str(number),
            str(stage["rank"]),
            str(stage["units"]),
            duration(stage["forward_s"]),
            duration(stage["backward_s"]),
            dotted(stage["first"]),
        )
        for number, stage in enumerate(pipeline_object(priced)["stages"])
    ]
    columns = ("stage", "rank", "units", "forward", "backward", "from")
    return table(columns, rows, columns[1:-1])


def _lane(spans: Sequence[Span], end_s: float, titled: bool) -> Markup:
    """A rank's actions; each with its name where there are few."""
    shapes: list[Markup] = []
    if titled:
        for span in spans:
            x, width = _x(span, end_s)
            title = f"{span.action}: {duration(span.end_s - span.start_s)}"
            shade = 0.6 if span.action.microbatch % 2 else None
            shapes.append(
                tag(
                    *("rect", tag("title", title)),
                    **{"class_": COLOUR[span.action.kind], "fill_opacity": shade},
                    **{"x": x, "y": 2, "width": width, "height": 20},
                )
            )
    else:
        for kind, colour in COLOUR.items():
            for odd in (0, 1):
                drawn = "".join(
                    f"M{x} 2h{width}v20h-{width}z"
                    for span in spans
                    if span.action.kind == kind and span.action.microbatch % 2 == odd
                    for x, width in [_x(span, end_s)]
                )
                if drawn:
                    shapes.append(
                        tag("path", class_=colour, d=drawn, fill_opacity=0.6 if odd else None)
                    )
    return _svg("lane", 24, *shapes)


def _x(span: Span, end_s: float) -> tuple[int, int]:
    first, last = (round(WIDTH * s / end_s) for s in (span.start_s, span.end_s))
    return first, max(1, last - first)


def _stepped(curve: Curve, end_s: float) -> list[tuple[float, float]]:
    """Held from one change to the next."""
    steps: list[tuple[float, float]] = []
    for time_s, held in curve:
        if steps:
            steps.append((time_s, steps[-1][1]))
        steps.append((time_s, held))
    return [*steps, (end_s, steps[-1][1])]


def _curve(curve: Curve, end_s: float, limit: float, kind: str) -> Markup:
    """An area under bytes over time, with the limit, if that is not far above."""
    most = max(held for _, held in curve)
    far = most < NEAR * limit
    top = 1.25 * most if far else 1.08 * max(limit, most)

    def y(held: float) -> str:
        return f"{100 * (1 - held / top):.1f}"

    points = list(_thinned([(round(WIDTH * t / end_s), y(held)) for t, held in curve]))
    area = f"M0 100L{' '.join(f'{x} {held}' for x, held in points)} {points[-1][0]} 100z"
    shapes = [tag("path", d=area)]
    if not far:
        shapes.append(tag("line", class_="limit", x1=0, x2=WIDTH, y1=y(limit), y2=y(limit)))
    return _svg(kind, 100, *shapes)


def _thinned(points: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Without those that repeat the one before."""
    last = None
    for point in points:
        if point != last:
            yield point
        last = point


def _svg(kind: str, height: int, *shapes: Markup) -> Markup:
    return tag(
        *("svg", *shapes),
        **{"class_": kind, "viewBox": f"0 0 {WIDTH} {height}", "preserveAspectRatio": "none"},
    )
