"""What the commands do; `autopar.cli.app` reads their options and prints their results."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.progress import progress
from autopar.files import plan_folder, whole_folder
from autopar.files.sources import relative_sources
from autopar.nouns import batch
from autopar.nouns.errors import UserError
from autopar.nouns.plan import to_json
from autopar.nouns.text.graph import to_text as graph_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopar.cli.unemitted import Unemitted
    from autopar.nouns.cluster import Cluster
    from autopar.nouns.imbalance import Imbalance
    from autopar.nouns.plan import Plan
    from autopar.nouns.style import Style
    from autopar.nouns.workload import Framework, Workload
    from autopar.planner import PlanResult


def search(
    model: str,
    cluster: str | Cluster,
    fix: Mapping[str, str],
    searcher: str | None,
    replicated: tuple[str, ...],
    profile: Path | None = None,
    verbose: bool = False,
    styles: tuple[Style, ...] = (),
    workload: Workload | None = None,
    imbalance: Imbalance | None = None,
) -> PlanResult:
    """The best plan of ``"model.py:Name"``, or of the ``workload`` of that name, for a cluster or
    its file. Raises `UserError`."""
    from autopar.cli.at_hand import quick_profile
    from autopar.cli.profile import libraries, processor
    from autopar.planner import Options, plan

    def at_hand(described: Cluster, framework: Framework) -> str | None:
        """The quick profile of the CPU cores at hand where the cluster is of them."""
        measured = quick_profile(described, progress, framework)
        return None if measured is None else str(measured)

    options = Options(
        replicated=replicated,
        profile=None if profile is None else str(profile),
        at_hand=at_hand,
        libraries=libraries,
        processor=processor(),
        style=styles[0] if len(styles) == 1 else None,
        styles=styles if len(styles) > 1 else (),
        imbalance=imbalance,
        verbose=verbose,
    )
    if searcher is not None:
        options = replace(options, searcher=_known(searcher))
    return plan(model, cluster, fix, options, progress, workload)


def price_unemitted(
    model: str,
    cluster: str,
    fix: Mapping[str, str],
    style: Style | None,
    options: Mapping[str, object],
) -> Unemitted | None:
    """The layout of ``fix`` priced alone; None where backends emit all of it.

    ``options`` are those that only a search reads. Raises `UserError`.
    """
    from autopar.planner.ask.pins import unemitted

    choices = unemitted(fix)
    if not choices:
        return None
    from autopar.cli.unemitted import price, without_effect

    if refusal := without_effect(options, choices):
        raise UserError(refusal)
    return price(model, cluster, fix, style, progress)


def check_output(folder: Path) -> None:
    """Refuses a place for a plan before the search, not after it. Raises `UserError`."""
    try:
        plan_folder.check_writable(folder)
        there = folder.absolute().parent
        while not there.exists():
            there = there.parent
        Path(tempfile.mkdtemp(prefix=".autopar.", dir=there)).rmdir()
    except OSError as error:
        raise UserError(
            f"-o {folder}: no folder can be made there ({error.strerror}: {error.filename}); give "
            "-o a place where you may write, such as -o ./plan or one under your home folder"
        ) from None


def plan_files(result: PlanResult, folder: str | Path) -> tuple[dict[str, str], float]:
    """Every file of the plan's ``folder`` as text, and the CPU seconds that making them took.

    The workload is named from the folder and sources from the workload, so that equal checkouts
    have equal folders.
    """
    start = time.process_time()
    home = Path(result.plan.workload.partition(":")[0]).resolve().parent
    workload = plan_folder.relative_workload(folder, result.plan.workload)
    cluster_file = result.plan.cluster_file and plan_folder.relative(
        folder, result.plan.cluster_file
    )
    inside = {**_program(result), **_carried(result)}
    program = {f"{plan_folder.PROGRAM}/{name}": text for name, text in inside.items()}
    files = {
        plan_folder.PLAN: to_json(
            replace(result.plan, workload=workload, cluster_file=cluster_file)
        ),
        plan_folder.CLUSTER: result.cluster.to_json() + "\n",
        plan_folder.GRAPH: graph_text(relative_sources(result.captured.graph, home)) + "\n",
        plan_folder.BATCH: batch.to_json(result.captured.batch),
        plan_folder.REPORT: _report(result),
        plan_folder.COLLECTIVES: _collectives(result, program),
        **program,
    }
    return files, time.process_time() - start


def write_plan(result: PlanResult, folder: str | Path, files: Mapping[str, str]) -> None:
    """Puts ``files`` of `plan_files` into ``folder``, with the arrays that a JAX program has beside
    its workload's file; a script has its own. Raises `PlanFolderError`."""
    arrays: dict[str, bytes] = {}
    if any(name.startswith(f"{plan_folder.PROGRAM}/{plan_folder.WORKLOAD}/") for name in files):
        from autopar.cli.carried import carried_arrays

        arrays = carried_arrays(result.captured)
    inside = {f"{plan_folder.PROGRAM}/{name}": content for name, content in arrays.items()}
    plan_folder.write(folder, {**files, **inside})


class StaleCluster(UserError):
    """The cluster file is another one now than when the plan was made for it."""


def check_cluster_file(folder: Path, plan: Plan) -> None:
    """Raises `StaleCluster` where the cluster file says something else now.

    Nothing but planning reads that file, so a folder runs without it; progress says so then.
    """
    changed = changed_cluster(folder, plan)
    if changed:
        raise StaleCluster(
            f"{changed}; plan {plan.workload} again with `autopar plan`, or put that back"
        )


def changed_cluster(folder: Path, plan: Plan) -> str:
    """What has changed, empty: nothing that is known."""
    from autopar.files.cluster_file import ClusterFileError, load_cluster

    if not plan.cluster_file:
        return ""
    file = (folder.resolve() / plan.cluster_file).resolve()
    if not file.is_file():
        progress(
            f"note: {file}, which the plan was made for, is not there: whether it changed is "
            "not known"
        )
        return ""
    was = plan.fingerprints.cluster_file
    try:
        now = load_cluster(file).fingerprint
    except ClusterFileError as error:
        return f"the cluster file has changed since the plan was made and cannot be read: {error}"
    if now == was:
        return ""
    return (
        f"{file} has changed since the plan was made for it: its fingerprint was {was} and is {now}"
    )


def plan_summary(result: PlanResult) -> list[RenderableType]:
    from autopar.report.summary import summary

    return summary(result.plan, result.cluster, _notes(result))


def plan_object(result: PlanResult, emit_s: float | None) -> dict[str, Any]:
    """What ``--json`` prints; phases are CPU seconds, ``emit`` that of writing the program."""
    from autopar.report.summary import summary_object

    phases = dict(result.search_time_s)
    if emit_s is not None:
        phases["emit"] = emit_s
    return summary_object(result.plan, phases, result.unruled_ops, _notes(result))


def _notes(result: PlanResult) -> list[str]:
    from autopar.report.notes import notes

    samples = result.captured.samples
    made = notes(
        result.lowered, result.plan, result.cluster, samples, result.obstacles, result.fewer
    )
    return [*result.captured.notes, *made]


def _program(result: PlanResult) -> dict[str, str]:
    """The program, tried. Raises `UserError` where it could not run."""
    if result.plan.framework == "jax":
        from autopar.emit.jax import emit as emit_jax
        from autopar.runtime.jax.programs import import_all

        program = emit_jax(result.lowered, result.plan, result.captured)
        import_all(program)
        return program
    from autopar.emit.pytorch import emit
    from autopar.runtime.pytorch.dry_run import dry_run
    from autopar.runtime.shared.imported import imported

    program = emit(result.lowered, result.plan, result.captured)
    model, train = (f"{plan_folder.PROGRAM}/{name}" for name in plan_folder.CODE)
    dry_run(program[plan_folder.MODEL], model, result.captured.batch)
    imported(program[plan_folder.TRAIN], train)
    return program


def _carried(result: PlanResult) -> dict[str, str]:
    """The user's own files that a JAX program has beside its code."""
    if result.plan.framework != "jax":
        return {}
    from autopar.cli.carried import carried_sources

    return carried_sources(result.plan.workload)


def _collectives(result: PlanResult, program: Mapping[str, str]) -> str:
    from autopar.lowering.collectives import priced_collectives

    stored = {name: tensor.dtype for name, tensor in result.captured.tensors.items()}
    clips = result.workload.clip_norm is not None
    library = result.cluster.levels[0].library
    priced = priced_collectives(result.lowered, result.plan, stored, clips, library)
    rows = [asdict(row) for row in priced]
    digests = {name: whole_folder.digest(text.encode()) for name, text in program.items()}
    made = {"format": plan_folder.COLLECTIVES_FORMAT, "program": digests, "rows": rows}
    return json.dumps(made, indent=1) + "\n"


def _report(result: PlanResult) -> str:
    from autopar.report.render import to_text

    return to_text(plan_summary(result))


def _known(searcher: str) -> str:
    from autopar.searchers import SEARCHERS

    names = list(SEARCHERS)
    if searcher not in names:
        raise UserError(
            f"--searcher {searcher}: there is none of that name; choose {', '.join(names)}"
        )
    return searcher
