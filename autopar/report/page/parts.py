"""Time and memory by part as stacked bars, and predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.nouns.plan import Plan
from autopar.report.page.html import Markup, joined, section, table, tag
from autopar.report.parts import time_parts
from autopar.report.runs import measured_rows
from autopar.report.units import duration, percent, size
from autopar.runtime.jobs.result import RunResult

COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5")


def stacked(
    parts: Mapping[str, float], whole: float, shown: Callable[[float], str], of: str
) -> Markup:
    """A bar of ``whole`` filled with ``parts``, and what they are; ``of``: what a share is of."""
    pieces, legend = [], []
    for (name, value), colour in zip(parts.items(), COLOURS * len(parts), strict=False):
        share = value / whole if whole else 0.0
        title = f"{name}: {shown(value)}"
        pieces.append(tag("i", class_=colour, style=f"width:{100 * share:.3f}%", title=title))
        key = tag("i", class_=f"key {colour}")
        legend.append(tag("li", key, tag("span", name), shown(value), tag("em", percent(share))))
    return joined(
        [
            tag("div", *pieces, class_="bar", role="img", aria_label=of),
            tag("ul", *legend, class_="legend"),
        ]
    )


def time_section(plan: Plan) -> Markup:
    """The step by what it is spent on, then by phase."""
    predicted = plan.prediction
    phases = {
        "forward": predicted.forward_time_s,
        "backward, gradients": predicted.backward_time_s,
        "optimizer": predicted.optimizer_time_s,
    }
    least, most = predicted.time_band_s
    gap = 1 - predicted.lower_bound_s / predicted.step_time_s
    note = (
        f"A step of {duration(predicted.step_time_s)}, band {duration(least)} to {duration(most)}. "
        f"No plan of the searched space is faster than {duration(predicted.lower_bound_s)}, "
        f"{percent(gap)} below."
    )
    step_s = predicted.step_time_s
    parts = [stacked(time_parts(predicted), step_s, duration, "time by part")]
    if predicted.forward_time_s > 0:
        parts += [tag("h3", "by phase"), stacked(phases, step_s, duration, "time by phase")]
    return section("Time by part", *parts, note=note)


def memory_section(plan: Plan) -> Markup:
    memory = plan.prediction.memory_bytes
    least, most = plan.prediction.memory_band_bytes
    note = (
        f"{size(memory.total)} at the peak of the fullest device, of {size(memory.limit)}; band "
        f"{size(least)} to {size(most)}. The bar is the whole device."
    )
    whole = max(memory.limit, memory.total)
    return section(
        "Memory by part", stacked(memory.parts(), whole, size, "memory by part"), note=note
    )


def run_section(plan: Plan, run: RunResult) -> Markup:
    """What a run of the plan measured."""
    first, last = run.losses[0], run.losses[-1]
    note = f"{len(run.losses)} steps: loss {first:.4f} to {last:.4f}, {run.style} execution."
    columns = ("", "measured", "predicted", "measured / predicted")
    rows = measured_rows(run, plan.prediction)
    return section("Measured beside predicted", table(columns, rows, columns[1:]), note=note)
