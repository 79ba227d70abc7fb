"""The commands that read what there is: ``explain``, ``report``, ``show`` and ``diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import Json, PlanFolder
from autopar.cli.printing import show
from autopar.cli.progress import progress


def explain(
    folder: PlanFolder,
    what: Annotated[
        str | None, typer.Option("--op", help="Only ops and parameters whose key contains this.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the step as a trace that Perfetto opens."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Only what devices of other memory would buy: 90GB, or 64GiB,96GiB.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Why a plan is as it is: strategies, what they move and cost, what else was close."""
    from autopar.cli.explaining import explanation, other_memory

    if memory is not None:
        parts, data = other_memory(folder, memory)
    else:
        parts, data = explanation(folder, what, trace)
    show(parts, data, json)


def report(
    folder: PlanFolder,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file.")] = Path("report.html"),
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="FILE", help="What `autopar run --json` printed, to stand beside it."
        ),
    ] = None,
) -> None:
    """A plan as one HTML file that needs no network."""
    from autopar.cli.report import write_report

    size_bytes = write_report(folder, output, run)
    progress(f"written to {output}, {size_bytes / 1000:.0f} kB; open it in a browser")


def show_text(
    source: Annotated[
        str, typer.Argument(metavar="MODEL.PY[:NAME]|PLAN/", help="A model, or a plan of one.")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="graph|plan|lowered",
            help="Of a plan: the model's graph, the decisions, or all that follows from both: "
            "shardings and collectives, op by op. Else the last two.",
        ),
    ] = None,
    stage: Annotated[
        int | None, typer.Option("--stage", min=0, help="What one stage of a pipeline runs.")
    ] = None,
) -> None:
    """A model or a plan op by op as text: result, kind, operands, shape, sharding, source."""
    from autopar.cli.show import text_of

    print(text_of(source, form, stage))


def diff(
    a: Annotated[Path, typer.Argument(metavar="A/", help="A plan.")],
    b: Annotated[Path, typer.Argument(metavar="B/", help="Another plan.")],
    json: Json = False,
) -> None:
    """What changed from one plan to another: degrees, strategies, predicted cost."""
    from autopar.cli.differences import difference

    show(*difference(a, b), json)
