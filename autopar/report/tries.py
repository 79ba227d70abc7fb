"""Plans that ran beside one another: what each was priced at, and what it took."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from autopar.planner.advice.tries import Tried
from autopar.report.render import indented, table
from autopar.report.units import duration


def tries(tried: Sequence[Tried], kept: int) -> list[RenderableType]:
    """A row a plan; measured beside predicted, how far off the price was, and which is kept."""
    columns = ("layout", "predicted", "measured", "the price was off by", "")
    rows = table(*columns, right=columns[1:4])
    for place, one in enumerate(tried):
        off = one.measured_s / one.predicted_s - 1
        last = "kept" if place == kept else ""
        rows.add_row(
            one.layout, duration(one.predicted_s), duration(one.measured_s), f"{off:+.0%}", last
        )
    noise = max(one.noise for one in tried)
    spread = f"medians of {len(tried[0].runs_s)} runs each, which differ by up to {noise:.0%}"
    return [
        Text("\nTried on the devices at hand", style="bold"),
        indented(rows),
        indented(Text(spread)),
    ]


def tries_object(tried: Sequence[Tried], kept: int) -> list[dict[str, object]]:
    """The same for ``--json`` and the plan's folder, in seconds."""
    return [
        {
            "layout": one.layout,
            "predicted_s": one.predicted_s,
            "measured_s": one.measured_s,
            "runs_s": list(one.runs_s),
            "kept": place == kept,
        }
        for place, one in enumerate(tried)
    ]
