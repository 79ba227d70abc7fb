"""The commands that search or price: ``plan`` and ``estimate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.options import (
    Arch,
    BatchTokens,
    ClusterFile,
    CompileAhead,
    Devices,
    ExpertImbalance,
    ExpertLoads,
    Fix,
    GlobalBatch,
    Json,
    Model,
    ModelOrNone,
    OptionError,
    Output,
    PlanFolder,
    Precision,
    Profile,
    Replicated,
    Searcher,
    SequenceTokens,
    StyleOption,
    Tries,
    Verbose,
    parse_imbalance,
    parse_style,
    parse_styles,
)
from autopar.cli.printing import results_only, show
from autopar.cli.progress import progress
from autopar.nouns.errors import UserError
from autopar.nouns.style import FASTEST

if TYPE_CHECKING:
    from autopar.cli.compiling import Beside
    from autopar.cli.estimates import EstimateRequest
    from autopar.cli.tries import Trial
    from autopar.nouns.style import Style
    from autopar.planner import PlanResult


def plan(
    model: Model,
    cluster: ClusterFile,
    output: Output = Path("plan"),
    fix: Fix = None,
    searcher: Searcher = None,
    allow_replicated: Replicated = None,
    style: StyleOption = None,
    profile: Profile = None,
    tries: Tries = 1,
    expert_imbalance: ExpertImbalance = None,
    expert_loads: ExpertLoads = None,
    compile: CompileAhead = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Find the fastest plan that fits, and write it with its program.

    How the model is trained stands in its file: autopar.parallelize(...) and
    autopar.Workload(...) take optimizer, learning_rate, clip_norm (largest
    gradient norm), precision (dtype of compute) and seed.
    """
    from autopar.cli.commands import check_output, search, write_plan
    from autopar.cli.compiling import check, compiled
    from autopar.nouns.grammar import pairs_of

    replicated = tuple(allow_replicated or ())
    fixed, styles = pairs_of(fix or ()), parse_styles(style)
    options = {"--searcher": searcher, "--allow-replicated": replicated, "--profile": profile}
    options |= {"--try": str(tries) if tries > 1 else None}
    uneven = parse_imbalance(expert_imbalance, expert_loads)
    options |= {"--expert-imbalance": expert_imbalance, "--expert-loads": expert_loads}
    if _priced_alone(model, cluster, fixed, styles, options, json, output):
        return
    check_output(output)
    if compile:
        check(cluster)

    def planned(pins: Mapping[str, str]) -> PlanResult:
        return search(
            model, cluster, pins, searcher, replicated, profile, verbose, styles, imbalance=uneven
        )

    made = _searched(planned, fixed, tries, output, profile, json)
    result = made.result
    write_plan(result, output, made.files)
    beside = compiled(output, result) if compile else None
    _show_plan(result, made.emit_s, json, made.trial, beside)
    progress(f"written to {output}/; next: autopar run {output}, autopar verify {output}")


@dataclass(frozen=True, slots=True)
class _Searched:
    """A plan to write, and what was tried if several were.

    files:  of the plan's folder, as text.
    emit_s: CPU seconds that making them took.
    """

    result: PlanResult
    trial: Trial | None
    files: Mapping[str, str]
    emit_s: float


def _searched(
    planned: Callable[[Mapping[str, str]], PlanResult],
    fixed: Mapping[str, str],
    tries: int,
    output: Path,
    profile: Path | None,
    json: bool,
) -> _Searched:
    """Raises `UserError`, which names a layout that works where it can."""
    from autopar.cli.commands import plan_files
    from autopar.cli.instead import tried
    from autopar.files import plan_folder

    def sketched(pins: Mapping[str, str]) -> str:
        """A plan and its program, which nothing is written of."""
        from autopar.cli.tries import in_words

        made = planned(pins)
        plan_files(made, output)
        return f"{in_words(made.plan)}, {made.plan.prediction.step_time_s:.3g} s a step"

    try:
        result, trial = planned(fixed), None
        if tries > 1:
            from autopar.cli.tries import try_few

            with results_only(json):
                trial = try_few(result, tries, fixed, planned, output, profile)
            result = trial.other or result
        files, emit_s = plan_files(result, output)
    except UserError as error:
        if not error.instead:
            raise
        raise tried(error, fixed, sketched) from None
    if trial is not None:
        files |= {plan_folder.TRIED: trial.to_json()}
    return _Searched(result, trial, files, emit_s)


def tune(
    folder: PlanFolder,
    tries: Annotated[
        int,
        typer.Option("--try", metavar="N", min=2, help="This plan and N - 1 that lost to it."),
    ] = 3,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Run a plan and those that lost to it for a few steps here, and keep the fastest.

    The plan that is kept stands in the same folder then; tried.json has what
    each took, and what it was priced at.
    """
    from autopar.cli.commands import check_cluster_file, check_output, search
    from autopar.cli.tries import tune as tuned
    from autopar.files import plan_folder
    from autopar.report.tries import tries as table
    from autopar.report.tries import tries_object

    made = plan_folder.read_plan(folder)
    plan_folder.check_whole(folder, made)
    check_cluster_file(folder, made)
    check_output(folder)
    model, file = plan_folder.workload_of(folder, made), folder / made.cluster_file
    known = made.cluster_file and file.is_file()
    cluster = str(file.resolve()) if known else plan_folder.read_cluster(folder)

    def planned(pins: Mapping[str, str]) -> PlanResult:
        kept, styles, routes = made.replicated_ops, (made.style,), made.expert_imbalance
        return search(model, cluster, pins, None, kept, profile, styles=styles, imbalance=routes)

    with results_only(json):
        trial = tuned(folder, tries, planned, profile)
    data = {"tried": tries_object(trial.tried, trial.place)}
    show(table(trial.tried, trial.place), data, json)
    kept = trial.tried[trial.place].layout
    progress(f"{folder}/ {'is now' if trial.place else 'stays'} {kept}")


def estimate(
    cluster: ClusterFile,
    model: ModelOrNone = None,
    arch: Arch = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    fix: Fix = None,
    searcher: Searcher = None,
    allow_replicated: Replicated = None,
    style: StyleOption = None,
    profile: Profile = None,
    devices: Devices = None,
    batch_tokens: BatchTokens = None,
    seq: SequenceTokens = None,
    expert_imbalance: ExpertImbalance = None,
    expert_loads: ExpertLoads = None,
    json: Json = False,
) -> None:
    """Predicted time and memory; nothing is written. Exit code 3 where it does not fit.

    With --arch, --devices, --batch-tokens or --seq the model is priced as a
    transformer: the layout of --fix, or where that pins nothing the fastest
    of all that fit.
    """
    _check_one(model, arch)
    replicated, styles = tuple(allow_replicated or ()), parse_styles(style)
    uneven = parse_imbalance(expert_imbalance, expert_loads)
    of_a_search = {"--searcher": searcher, "--allow-replicated": replicated, "--profile": profile}
    of_a_search |= {"--expert-imbalance": expert_imbalance, "--expert-loads": expert_loads}
    _check_read(model, of_a_search, {"--global-batch": global_batch, "--precision": precision})
    varied = {"--devices": devices, "--batch-tokens": batch_tokens, "--seq": seq}
    if model is not None and all(value is None for value in varied.values()):
        from autopar.cli.commands import search
        from autopar.nouns.grammar import pairs_of

        fixed = pairs_of(fix or ())
        if _priced_alone(model, cluster, fixed, styles, of_a_search, json):
            return
        result = search(
            model, cluster, fixed, searcher, replicated, profile, styles=styles, imbalance=uneven
        )
        _show_plan(result, None, json)
        return
    _check_read(None, of_a_search, {})
    from autopar.cli.estimates import EstimateRequest

    question = EstimateRequest(
        cluster=cluster,
        arch=arch,
        model=model,
        fix=tuple(fix or ()),
        devices=devices,
        global_batch=global_batch,
        batch_tokens=batch_tokens,
        seq=seq,
        precision=precision,
        style=parse_style(style),
    )
    _show_estimate(question, json)


def _priced_alone(
    model: str,
    cluster: str,
    fix: Mapping[str, str],
    styles: Sequence[Style],
    options: Mapping[str, object],
    json: bool,
    output: Path | None = None,
) -> bool:
    """Prices a layout that no backend emits and shows it; False where all of ``fix`` is emitted.

    ``options`` are those that only a search reads; ``output`` is told to stay unwritten.
    """
    from autopar.cli.commands import price_unemitted

    several = {"--style": FASTEST} if len(styles) > 1 else {}
    style = styles[0] if len(styles) == 1 else None
    priced = price_unemitted(model, cluster, fix, style, {**options, **several})
    if priced is None:
        return False
    print(priced.to_json() if json else priced.to_text())
    if output is not None:
        progress(f"nothing is written to {output}/: {priced.why}")
    if not priced.estimate.fits:
        raise typer.Exit(3)
    return True


def _show_estimate(question: EstimateRequest, json: bool) -> None:
    """Exits with 3 where nothing fits."""
    from autopar.cli.estimates import answer

    priced = answer(question)
    print(priced.to_json() if json else priced.text)
    if not priced.fits:
        raise typer.Exit(3)


def _check_one(model: str | None, arch: str | None) -> None:
    """Raises `OptionError` unless there is a model file or figures of one, and not both."""
    if (model is None) == (arch is None):
        raise OptionError(
            "estimate needs either a model file or --arch; "
            f"it got {'neither' if model is None else 'both'}"
        )


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
            f"{given[0]} is for a model file that is planned; a transformer is priced alone, by "
            "constants fitted to published runs"
        )
    if given:
        raise OptionError(
            f"{given[0]} is for --arch; the batch and precision of {model} stand in the file"
        )


def _show_plan(
    result: PlanResult,
    emit_s: float | None,
    json: bool,
    trial: Trial | None = None,
    compiled: Beside | None = None,
) -> None:
    from autopar.cli.commands import plan_object, plan_summary

    parts, data = plan_summary(result), plan_object(result, emit_s)
    if trial is not None:
        from autopar.report.tries import tries, tries_object

        parts += tries(trial.tried, trial.place)
        data |= {"tried": tries_object(trial.tried, trial.place)}
    if compiled is not None:
        parts, data = [*parts, *compiled[0]], data | compiled[1]
    show(parts, data, json)
