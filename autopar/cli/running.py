"""The commands that start processes: ``run``, ``verify``, ``rehearse`` and ``profile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.options import ClusterFile, Device, Json, PlanFolder
from autopar.cli.printing import results_only, show
from autopar.cli.progress import progress
from autopar.nouns.workload import Framework

if TYPE_CHECKING:
    from autopar.nouns.plan import Plan
    from autopar.runtime.jobs.result import RunResult


def run(
    folder: PlanFolder,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to train.")] = 20,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--eager",
            help="Use torch.compile, or not; else as the plan says. JAX always compiles.",
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="A checkpoint to go on from, of any plan.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Where a checkpoint goes at the end.")
    ] = None,
    save_every: Annotated[
        int, typer.Option("--save-every", min=0, help="Also after every so many steps.")
    ] = 0,
    device: Device = "auto",
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Where what was measured goes, by phase.")
    ] = None,
    json: Json = False,
) -> None:
    """Train with a plan on this machine; predicted time stands beside measured."""
    from autopar.cli.commands import check_cluster_file
    from autopar.files.plan_folder import check_whole, read_plan
    from autopar.nouns.errors import UserError
    from autopar.runtime.jobs import launch

    if save_every and save is None:
        raise UserError(f"--save-every {save_every}: give --save too, where checkpoints go")
    made = read_plan(folder)
    check_whole(folder, made)
    check_cluster_file(folder, made)
    if profile is not None:
        from autopar.cost_models.profile_file import check_target

        check_target(profile)
    with results_only(json):
        result = launch.run(
            folder,
            steps,
            compile=compile,
            resume=resume,
            save=save,
            save_every=save_every,
            device=device,
        )
    _show_run(result, made, json)
    if profile is not None:
        from autopar.cli.profile import remember

        progress(remember(folder, result, profile, progress))


def _show_run(result: RunResult, made: Plan, json: bool) -> None:
    """What a run measured beside what its plan predicted."""
    from dataclasses import asdict

    from autopar.report.runs import phases, run_summary

    predicted = made.prediction
    foreseen = {phase: seconds for phase, _, seconds in phases(result, predicted)}
    memory = predicted.memory_bytes.total
    data = {**asdict(result), "predicted_memory_bytes": memory, "predicted_phases_s": foreseen}
    show(run_summary(result, predicted, made.style, made.expert_imbalance), data, json)


def verify(folder: PlanFolder, device: Device = "cpu", json: Json = False) -> None:
    """Check that a plan computes what the single-device model computes, in float64."""
    from autopar.cli.commands import check_cluster_file
    from autopar.files.plan_folder import check_whole, read_plan
    from autopar.report.runs import verify_summary
    from autopar.runtime.jobs import launch

    made = read_plan(folder)
    check_whole(folder, made)
    check_cluster_file(folder, made)
    progress(f"running {folder} and its model side by side")
    with results_only(json):
        result = launch.verify(folder, device)
    show(verify_summary(result), result.to_json(), json)
    if not result.passed:
        raise typer.Exit(1)


def rehearse(folder: PlanFolder, json: Json = False) -> None:
    """Go through a plan's step as on GPUs, without one: what would mix, wait or be refused."""
    from autopar.report.rehearsals import rehearsal_summary
    from autopar.runtime.rehearsal.rehearse import rehearse as rehearsed

    made = rehearsed(folder)
    show([rehearsal_summary(made)], made.to_json(), json)
    if made.wrong:
        raise typer.Exit(1)


def profile(
    cluster: ClusterFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The database.")] = Path(
        "profile.db"
    ),
    framework: Annotated[
        Framework | None,
        typer.Option(help="What programs are of that it is to price; PyTorch where it is there."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure ops and collectives on the devices at hand, for `plan --profile`."""
    from autopar.cli.profile import installed, profile_cluster
    from autopar.cost_models.profile_file import check_target

    check_target(output)
    framework = framework or installed()
    summary = profile_cluster(cluster, output, progress, framework=framework)
    show([summary], {"profile": str(output), "measured": summary}, json)
