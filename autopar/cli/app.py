"""The ``autopar`` command: progress to stderr, results to stdout.

Exit codes: 0 done, 1 a plan that does not compute what its model computes, 2 a user's error, 3 no
plan fits. Nothing heavy is imported before a command runs: ``autopar --help`` is instant.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from autopar.nouns.errors import UserError

STOPPED = 130
"""How typer ends a command on Ctrl-C."""
REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT),
}
"""Why a system refuses a file or a place, whoever asks for it; nothing of ours causes these."""

try:
    import typer

    from autopar.cli.options import (
        Arch,
        ClusterFile,
        Device,
        Fix,
        GlobalBatch,
        Json,
        Model,
        PlanFolder,
        Precision,
        Profile,
        Replicated,
        Searcher,
        StyleOption,
        Verbose,
    )
    from autopar.cli.progress import progress
except KeyboardInterrupt:  # most of the start of a command is spent there
    print("autopar: stopped", file=sys.stderr)
    sys.exit(STOPPED)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopar.nouns.style import Style
    from autopar.planner import PlanResult


app = typer.Typer(
    name="autopar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan, emit, run and verify distributed training of an ordinary model.",
)


class OptionError(UserError):
    """An option whose value makes no sense; the text says which and what would."""


def parse_style(text: str | None) -> Style | None:
    """Raises `OptionError`."""
    from autopar.nouns.style import STYLES

    for style in STYLES:
        if text == style:
            return style
    if text is None:
        return None
    raise OptionError(f"--style {text}: choose {' or '.join(STYLES)}")


@app.command()
def plan(
    model: Model,
    cluster: ClusterFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan goes.")] = Path(
        "plan"
    ),
    fix: Fix = None,
    searcher: Searcher = None,
    allow_replicated: Replicated = None,
    style: StyleOption = None,
    profile: Profile = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Find the fastest plan that fits, and write it with its program.

    How the model is trained stands in its file: autopar.parallelize(...) and
    autopar.Workload(...) take optimizer, learning_rate, clip_norm (largest
    gradient norm), precision (dtype of compute) and seed.
    """
    from autopar.cli.commands import check_output, plan_files, search
    from autopar.cost_models.layout import fix_pairs
    from autopar.files import plan_folder

    replicated = tuple(allow_replicated or ())
    fixed, how = fix_pairs(fix or ()), parse_style(style)
    options = {"--searcher": searcher, "--allow-replicated": replicated, "--profile": profile}
    if _priced_alone(model, cluster, fixed, how, options, json, output):
        return
    check_output(output)
    found = search(model, cluster, fixed, searcher, replicated, profile, verbose, how)
    files, emit_s = plan_files(found, output)
    plan_folder.write(output, files)
    _show_plan(found, emit_s, json)
    progress(f"written to {output}/; next: autopar run {output}, autopar verify {output}")


@app.command()
def estimate(
    cluster: ClusterFile,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL.PY[:NAME]", help="The file that holds the model.")
    ] = None,
    arch: Arch = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    fix: Fix = None,
    searcher: Searcher = None,
    allow_replicated: Replicated = None,
    style: StyleOption = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Predicted time and memory; nothing is written. Exit code 3 where it does not fit."""
    if (model is None) == (arch is None):
        raise OptionError(
            "estimate needs either a model file or --arch; "
            f"it got {'neither' if model is None else 'both'}"
        )
    replicated, how = tuple(allow_replicated or ()), parse_style(style)
    of_a_search = {"--searcher": searcher, "--allow-replicated": replicated, "--profile": profile}
    _check_read(model, of_a_search, {"--global-batch": global_batch, "--precision": precision})
    if model is not None:
        from autopar.cli.commands import search
        from autopar.cost_models.layout import fix_pairs

        fixed = fix_pairs(fix or ())
        if _priced_alone(model, cluster, fixed, how, of_a_search, json):
            return
        found = search(model, cluster, fixed, searcher, replicated, profile, style=how)
        _show_plan(found, None, json)
        return
    from autopar.planner.estimate import estimate_files
    from autopar.report.estimates import render, to_json

    priced = estimate_files(
        arch or "", cluster, ",".join(fix or ()), global_batch, precision or "bf16", how
    )
    print(to_json(priced) if json else render(priced))
    if not priced.fits:
        raise typer.Exit(3)


def _priced_alone(
    model: str,
    cluster: str,
    fix: Mapping[str, str],
    style: Style | None,
    options: Mapping[str, object],
    json: bool,
    output: Path | None = None,
) -> bool:
    """Prices a layout that no backend emits and shows it; False where all of ``fix`` is emitted.

    ``options`` are those that only a search reads; ``output`` is told to stay unwritten.
    """
    from autopar.cli.commands import price_unemitted

    found = price_unemitted(model, cluster, fix, style, options)
    if found is None:
        return False
    print(found.to_json() if json else found.to_text())
    if output is not None:
        progress(f"nothing is written to {output}/: {found.why}")
    if not found.estimate.fits:
        raise typer.Exit(3)
    return True


def _check_read(
    model: str | None, of_a_search: Mapping[str, object], of_an_arch: Mapping[str, object]
) -> None:
    """Refuses options of ``estimate`` that this kind of estimate does not read.

    Raises `OptionError`.
    """
    unread = of_a_search if model is None else of_an_arch
    given = [name for name, value in unread.items() if value not in (None, ())]
    if given and model is None:
        raise OptionError(
            f"{given[0]} is for a model file; with --arch the layout of --fix is priced alone, by "
            "constants fitted to published runs"
        )
    if given:
        raise OptionError(
            f"{given[0]} is for --arch; the batch and precision of {model} stand in the file"
        )


def _only_of_arch(arch: str | None, given: Mapping[str, object]) -> None:
    """Raises `OptionError` for options that only ``--arch`` reads."""
    unread = [name for name, value in given.items() if value is not None]
    if arch is None and unread:
        raise OptionError(
            f"{unread[0]} is for --arch; the batch and precision of a model stand in its file"
        )


@app.command()
def run(
    folder: PlanFolder,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to train.")],
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
    from dataclasses import asdict

    from autopar.cli.commands import check_cluster_file
    from autopar.files.plan_folder import check_whole, read_plan
    from autopar.report.runs import phases, run_summary
    from autopar.runtime.jobs import launch

    made = read_plan(folder)
    check_whole(folder, made)
    check_cluster_file(folder, made)
    predicted = made.prediction
    if profile is not None:
        from autopar.cost_models.profile_file import check_target

        check_target(profile)
    with _results_only(json):
        found = launch.run(
            folder,
            steps,
            compile=compile,
            resume=resume,
            save=save,
            save_every=save_every,
            device=device,
        )
    foreseen = {phase: seconds for phase, _, seconds in phases(found, predicted)}
    memory = predicted.memory_bytes.total
    data = {**asdict(found), "predicted_memory_bytes": memory, "predicted_phases_s": foreseen}
    _show(run_summary(found, predicted, made.style), data, json)
    if profile is not None:
        from autopar.cli.profile import remember

        progress(remember(folder, found, profile, progress))


@app.command()
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
    with _results_only(json):
        found = launch.verify(folder, device)
    _show(verify_summary(found), found.to_json(), json)
    if not found.passed:
        raise typer.Exit(1)


@app.command()
def explain(
    folder: PlanFolder,
    what: Annotated[
        str | None, typer.Option("--op", help="Only ops and parameters whose key contains this.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the step as a trace that Perfetto opens."),
    ] = None,
    json: Json = False,
) -> None:
    """Why a plan is as it is: strategies, what they move and cost, what else was close."""
    from autopar.cli.commands import explanation

    parts, data = explanation(folder, what, trace)
    _show(parts, data, json)


@app.command()
def show(
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


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A/", help="A plan.")],
    b: Annotated[Path, typer.Argument(metavar="B/", help="Another plan.")],
    json: Json = False,
) -> None:
    """What changed from one plan to another: degrees, strategies, predicted cost."""
    from autopar.cli.commands import difference

    _show(*difference(a, b), json)


@app.command()
def export(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN/|MODEL.PY[:NAME]", help="A plan, or a model with --cluster and --fix."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="NAME",
            help="torchtitan, megatron, megatron-bridge, deepspeed, accelerate, transformers, "
            "maxtext, levanter, axlearn, partition-specs, slurm, kubeflow, ray or skypilot.",
        ),
    ] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="Where its files go.")] = Path(
        "export"
    ),
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="With a model or --arch: a cluster.yaml.")
    ] = None,
    fix: Fix = None,
    arch: Arch = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    json: Json = False,
) -> None:
    """Write a plan as settings of another trainer or launcher.

    A model, or --arch, with --fix exports a layout that no program can run yet.
    """
    from autopar.cli import exports

    _only_of_arch(arch, {"--global-batch": global_batch, "--precision": precision})
    if (source is None) == (arch is None):
        raise OptionError(
            "export needs either a plan or model, or --arch; "
            f"it got {'neither' if source is None else 'both'}"
        )
    asked = exports.Asked(source, arch, cluster, tuple(fix or ()), global_batch, precision)
    written = exports.export(asked, to, output)
    for sentence in written.left_out:
        progress(f"not carried: {sentence}")
    if json:
        import json as text

        print(text.dumps(written.to_object()))
        return
    print("\n".join(f"{output}/{name}" for name in written.files))
    progress(f"next: {written.start}")


@app.command("import")
def import_layout(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A torchtitan recipe (.py, .toml), a file of Megatron's arguments, an Accelerate "
            "YAML or a DeepSpeed JSON.",
        ),
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL.PY[:NAME]", help="The model that it trains.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Whose file it is; else its ending tells."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Where it runs: a cluster.yaml.")
    ] = None,
    arch: Arch = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    json: Json = False,
) -> None:
    """The layout of a run that exists as --fix, priced beside the fastest one here."""
    from autopar.cli import imports

    if model is not None and arch is not None:
        raise OptionError("import prices a model or --arch, not both")
    if model is not None:
        _only_of_arch(arch, {"--global-batch": global_batch, "--precision": precision})
    found = imports.imported(
        imports.Asked(file, trainer, model, arch, cluster, global_batch, precision)
    )
    for note in found.found.notes:
        progress(f"note: {note}")
    if json:
        import json as text

        print(text.dumps(found.to_object()))
        return
    print(found.to_text())


@app.command()
def profile(
    cluster: ClusterFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The database.")] = Path(
        "profile.db"
    ),
    json: Json = False,
) -> None:
    """Measure ops and collectives on the devices at hand, for `plan --profile`."""
    from autopar.cli.profile import profile_cluster
    from autopar.cost_models.profile_file import check_target

    check_target(output)
    summary = profile_cluster(cluster, output, progress)
    _show([summary], {"profile": str(output), "measured": summary}, json)


@contextmanager
def _results_only(json: bool) -> Iterator[None]:
    """With ``--json``, what the processes of a job print goes to stderr."""
    if not json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show_plan(found: PlanResult, emit_s: float | None, json: bool) -> None:
    from autopar.cli.commands import plan_object, plan_summary

    _show(plan_summary(found), plan_object(found, emit_s), json)


def _show(parts: Iterable[RenderableType], data: dict[str, Any], json: bool) -> None:
    if json:
        import json as text

        print(text.dumps(data))
        return
    from autopar.report.render import show

    show(parts)


def main() -> None:
    """The entry point: runs the command and turns a user's error into one message."""
    try:
        app()
    except UserError as error:
        progress(f"autopar: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        progress(f"autopar: {error.filename}: {error.strerror}; give another place")
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt:
        progress("autopar: stopped")
        sys.exit(STOPPED)
    except SystemExit as end:
        if end.code == STOPPED:
            progress("autopar: stopped")
        raise
