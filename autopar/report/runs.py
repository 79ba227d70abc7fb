"""What `autopar run` and `autopar verify` say at their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from autopar.report.render import indented, table
from autopar.report.units import duration, size

if TYPE_CHECKING:
    from autopar.runtime.launch import RunResult
    from autopar.runtime.verified import VerifyResult


def run_summary(found: RunResult, predicted_memory_bytes: int) -> list[RenderableType]:
    """Loss at both ends, and what was measured beside what was predicted."""
    columns = ("", "measured", "predicted", "measured / predicted")
    rows = table(*columns, right=columns[1:])
    step, foreseen = found.step_time_s, found.predicted_step_time_s
    rows.add_row("step (median)", duration(step), duration(foreseen), f"{step / foreseen:.2f}")
    if found.peak_memory_bytes:
        peak, foreseen = found.peak_memory_bytes, predicted_memory_bytes
        rows.add_row("memory (fullest)", size(peak), size(foreseen), f"{peak / foreseen:.2f}")
    title = f"{len(found.losses)} steps: loss {found.losses[0]:.4f} -> {found.losses[-1]:.4f}"
    return [Text(title, style="bold"), indented(rows)]


def verify_summary(found: VerifyResult) -> list[RenderableType]:
    """Every error beside its tolerance, and whether the collectives are the priced ones."""
    from autopar.runtime.verified import TOLERANCE

    columns = ("largest relative error", "in float64", f"in {found.precision}", "at")
    rows = table(*columns, right=columns[1:3])
    exact, own = found.exact, found.own
    rows.add_row("loss", f"{exact.loss:.1e}", f"{own.loss:.1e}", "")
    rows.add_row("gradients", f"{exact.gradient:.1e}", f"{own.gradient:.1e}", exact.worst_gradient)
    rows.add_row("weights", f"{exact.weight:.1e}", f"{own.weight:.1e}", exact.worst_weight)
    moved = {True: "those that were priced", False: "NOT those that were priced", None: "not known"}
    parts: list[RenderableType] = [
        Text(f"Two steps on {found.ranks} processes against one device", style="bold"),
        indented(rows),
        Text(f"  allowed in float64: {TOLERANCE:.0e}. Dropout was off in both."),
        Text(f"  collectives issued: {moved[found.collectives_match]}"),
    ]
    parts += [Text(f"    {line}") for line in found.collective_differences]
    if found.first_difference:
        parts.append(Text(f"  first difference: {found.first_difference}"))
    style = "bold green" if found.passed else "bold red"
    said = "The plan computes what the model computes." if found.passed else "The plan is WRONG."
    return [*parts, Text(said, style=style)]
