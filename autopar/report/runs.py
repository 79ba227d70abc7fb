"""What `autopar run` and `autopar verify` say at their end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from autopar.report.render import indented, table
from autopar.report.routes import routes_measured
from autopar.report.units import duration, size

if TYPE_CHECKING:
    from autopar.nouns.imbalance import Imbalance
    from autopar.nouns.prediction import Prediction
    from autopar.nouns.style import Style
    from autopar.runtime.jobs.result import RunResult
    from autopar.runtime.verify.verified import VerifyResult


MEMORY = "memory (fullest)"
MOST = 100.0
"""Beyond this, measured over predicted says nothing of the model's error."""


def run_summary(
    result: RunResult,
    predicted: Prediction,
    style: Style = "eager",
    planned: Imbalance | None = None,
) -> list[RenderableType]:
    """Loss at both ends, and what was measured beside what was predicted, by phase.

    ``style``: the execution that the prediction is of. ``planned``: how uneven it takes routes.
    """
    columns = ("", "measured", "predicted", "measured / predicted")
    rows = table(*columns, right=columns[1:])
    apart = []
    for name, *cells in measured_rows(result, predicted):
        rows.add_row(name, *cells)
        apart += [] if cells[-1] != "-" or name == MEMORY else [name.strip()]
    title = f"{len(result.losses)} steps: loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"
    parts: list[RenderableType] = [Text(title, style="bold"), indented(rows)]
    least, most = predicted.time_band_s
    if result.style == style and not least <= result.step_time_s <= most:
        outside = f"  outside the band, {duration(least)} to {duration(most)}: "
        parts.append(
            Text(
                outside + "more processes than cores, other work here, or another device; "
                "measure this machine (autopar profile, plan --profile)"
            )
        )
    if result.style != style:
        was = f"  the run was {result.style}, the plan's times are of {style} execution"
        parts.append(Text(was))
    if apart:
        parts.append(
            Text(
                f"  no ratio of {', '.join(apart)}: over {MOST:.0f} times apart. So short a time "
                "is that of starting the work (Python, launches, processes that wait), which is "
                "not priced; or the run was not on the devices that the plan is for."
            )
        )
    if result.routes:
        parts.append(Text(f"  {routes_measured(result.routes, planned)}"))
    if result.peak_memory_bytes and result.memory_is:
        parts.append(Text(f"  measured memory: {result.memory_is}"))
    return parts


def measured_rows(result: RunResult, predicted: Prediction) -> list[tuple[str, str, str, str]]:
    """(what, measured, predicted, the one over the other or ``-``): the step, phases, memory."""
    times = [("step (median)", result.step_time_s, result.predicted_step_time_s)]
    times += [
        (f"  {phase}", took, foreseen_s) for phase, took, foreseen_s in phases(result, predicted)
    ]
    rows = [
        (name, duration(took), duration(foreseen_s), _ratio(took, foreseen_s) or "-")
        for name, took, foreseen_s in times
    ]
    if result.peak_memory_bytes:
        peak, foreseen = result.peak_memory_bytes, predicted.memory_bytes.total
        ratio = f"{peak / foreseen:.2f}" if result.memory_compares else "-"
        rows.append((MEMORY, size(peak), size(foreseen), ratio))
    return rows


def _ratio(measured_s: float, predicted_s: float) -> str:
    """Empty where the two are too far apart to be of the same work."""
    if not predicted_s / MOST <= measured_s <= MOST * predicted_s:
        return ""
    return f"{measured_s / predicted_s:.2f}" if predicted_s else "1.00"


def phases(result: RunResult, predicted: Prediction) -> list[tuple[str, float, float]]:
    """(phase, measured, predicted) seconds; none where a run did not tell them apart.

    Gradients move beside the backward pass, so the two are one phase.
    """
    times = result.phases_s
    if not times:
        return []
    backward_s = times["backward"] + times["exchange"]
    return [
        ("forward", times["forward"], predicted.forward_time_s),
        ("backward, gradients", backward_s, predicted.backward_time_s),
        ("optimizer", times["optimizer"], predicted.optimizer_time_s),
    ]


def _beyond_rounding(result: VerifyResult) -> Text:
    """What an error in the plan's own precision means that is more than its rounding."""
    own = result.own
    beyond = "not finite" if math.isinf(own.largest) else f"{own.largest:.1e}"
    return Text(
        f"  In {result.precision} the largest error is {beyond}, beyond "
        f"{result.rounding:.1e}, the root of that precision's epsilon: more "
        "than rounding does to most models in two steps. "
        + (
            "In float64 the plan is right, so it is the precision: this model magnifies "
            "rounding, or overflows, and may do so on one device too. Compare losses, or "
            "plan it with a wider precision or a lower learning_rate."
            if result.passed
            else "It is wrong in float64 too."
        )
    )


def verify_summary(result: VerifyResult) -> list[RenderableType]:
    """Every error beside its tolerance, and whether the collectives are the priced ones."""
    from autopar.runtime.verify.verified import TOLERANCE

    own_column = f"in {result.precision}" if not result.own_is else "as it is"
    columns = ("largest relative error", "in float64", own_column, "at")
    rows = table(*columns, right=columns[1:3])
    exact, own = result.exact, result.own
    rows.add_row("loss", f"{exact.loss:.1e}", f"{own.loss:.1e}", "")
    rows.add_row("gradients", f"{exact.gradient:.1e}", f"{own.gradient:.1e}", exact.worst_gradient)
    rows.add_row("weights", f"{exact.weight:.1e}", f"{own.weight:.1e}", exact.worst_weight)
    if exact.output is not None:
        rows.add_row("beside the loss", f"{exact.output:.1e}", "", exact.worst_output)
    if exact.evaluation is not None:
        rows.add_row("evaluation", f"{exact.evaluation:.1e}", "", exact.worst_evaluation)
    moved = {True: "those that were priced", False: "NOT those that were priced", None: "not known"}
    parts: list[RenderableType] = [
        Text(f"Two steps on {result.ranks} processes against one device", style="bold"),
        indented(rows),
        Text(
            f"  allowed in float64: {TOLERANCE:.0e}. Dropout was one factor in both, and every "
            "random number a fixed one (uniform 0.5, normal 1)."
        ),
        *([Text(f"  as it is: {result.own_is}.")] if result.own_is else []),
        Text(f"  collectives issued: {moved[result.collectives_match]}"),
    ]
    if result.narrow is not None:
        parts += [Text(f"  8 bits: {line}.") for line in result.narrow.sentences(TOLERANCE)]
    parts += [Text(f"    {line}") for line in result.collective_differences]
    parts += [Text(f"    less the equal gradients of {p}: XLA adds up one") for p in result.merged]
    parts += [
        Text(f"    less {p}, which XLA need not run: equal to others, or of one number")
        for p in result.joined
    ]
    parts += [Text(f"  NOT as planned: {line}") for line in result.recompute_differences]
    parts += [Text(f"  not checked: {sentence}") for sentence in result.unchecked]
    if result.first_difference:
        parts.append(Text(f"  {result.first_difference}"))
    far = not result.own_within_rounding
    if far:
        parts.append(_beyond_rounding(result))
    if not result.passed:
        return [*parts, Text("The plan is WRONG.", style="bold red")]
    if far:
        warning = (
            f"The plan computes what the model computes in float64; in {result.precision} far off."
        )
        return [*parts, Text(warning, style="bold yellow")]
    return [*parts, Text("The plan computes what the model computes.", style="bold green")]
