"""What the commands do; `autopar.cli.app` reads their options and prints their results."""

from __future__ import annotations

import difflib
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.progress import progress
from autopar.files import plan_folder, whole_file, whole_folder
from autopar.files.sources import relative_sources
from autopar.nouns import batch
from autopar.nouns.axes import PIPELINE
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
    from autopar.nouns.workload import Workload
    from autopar.planner import PlanResult


def search(
    model: str,
    cluster: str | Cluster,
    fix: Mapping[str, str],
    searcher: str | None,
    replicated: tuple[str, ...],
    profile: Path | None = None,
    verbose: bool = False,
    style: Style | None = None,
    workload: Workload | None = None,
    imbalance: Imbalance | None = None,
) -> PlanResult:
    """The best plan of ``"model.py:Name"``, or of the ``workload`` of that name, for a cluster or
    its file. Raises `UserError`."""
    from autopar.planner import Options, plan

    if profile is None:
        profile = _of_this_machine(cluster)
    options = Options(
        replicated=replicated,
        profile=None if profile is None else str(profile),
        style=style,
        imbalance=imbalance,
        verbose=verbose,
    )
    if searcher is not None:
        options = replace(options, searcher=_known(searcher))
    if profile is not None:
        from autopar.cli.profile import libraries, processor

        options = replace(options, libraries=libraries(), processor=processor())
    return plan(model, cluster, fix, options, progress, workload)


def _of_this_machine(cluster: str | Cluster) -> Path | None:
    """The quick profile of the CPU cores at hand where ``cluster`` is of them."""
    from autopar.cli.at_hand import quick_profile
    from autopar.files.cluster_file import load_cluster

    at_hand = cluster if not isinstance(cluster, str) else load_cluster(cluster)
    return quick_profile(at_hand, progress)


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
    changed = _changed_cluster(folder, plan)
    if changed:
        raise StaleCluster(
            f"{changed}; plan {plan.workload} again with `autopar plan`, or put that back"
        )


def _changed_cluster(folder: Path, plan: Plan) -> str:
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


def explanation(
    folder: Path, what: str | None, trace: Path | None = None
) -> tuple[list[RenderableType], dict[str, Any]]:
    """Tables and object of ``autopar explain``; the timeline goes to ``trace``.

    Raises `PlanFolderError`.
    """
    from autopar.report.alternatives import alternatives
    from autopar.report.explain import explain, explain_object
    from autopar.report.explained import explained, state_moved, streamed
    from autopar.report.revisit import open_folder
    from autopar.report.torus import axes_on_torus, torus_lines, torus_object

    again = open_folder(folder)
    if changed := _changed_cluster(folder, again.plan):
        progress(f"note: {changed}. What follows is of the cluster as it was")
    rows = [row for row in explained(again.lowered, again.prices) if (what or "") in row.key]
    if not rows:
        has = dict.fromkeys(row.key for row in explained(again.lowered, again.prices))
        near = difflib.get_close_matches(what or "", has, 5, 0.3) or list(has)[:5]
        raise UserError(
            f"--op {what}: none of the {len(has)} ops and parameters that do something has that in "
            f"its key; there are {', '.join(near)} and others"
        )
    shown = {row.key for row in rows if row.compute_s or row.moved}
    nodes = [
        (index, node.options)
        for index, node in enumerate(again.folded.nodes)
        if node.kind == "op" and node.key in shown
    ]
    progress(f"pricing what else {len(nodes)} ops could do")
    closest = {
        again.folded.nodes[index].key: others
        for index, others in alternatives(
            again.folded.problem, again.choice, nodes, objection=again.objection
        ).items()
    }
    step_time_s = again.plan.prediction.step_time_s
    collectives = plan_folder.read_collectives(folder)
    moved = state_moved(again.lowered, collectives)
    moved += streamed(again.plan.prediction.memory_bytes)
    state = () if what else moved
    forbidden = again.forbidden
    ranks = again.plan.degrees[PIPELINE]
    shown_parts = explain(rows, closest, step_time_s, state, forbidden, ranks)
    data = explain_object(rows, closest, state, forbidden)
    if lying := axes_on_torus(again.cluster, again.lowered.mesh, collectives):
        shown_parts += torus_lines(lying)
        data["torus"] = torus_object(lying)
    if again.plan.expert_imbalance is not None:
        from autopar.report.routes import placement_object, routes_lines

        shown_parts = [*routes_lines(again.plan), *shown_parts]
        data["expert_imbalance"] = asdict(again.plan.expert_imbalance)
        data["placing_experts"] = placement_object(again.plan)
    if trace is not None or len(again.plan.stages) > 1:
        from autopar.report.pipeline import explain_pipeline, pipeline_object
        from autopar.report.trace import trace_of

        pipeline = again.pipeline()
        if trace is not None:
            whole_file.write(trace, trace_of(pipeline))
            progress(f"timeline written to {trace}; open it at ui.perfetto.dev")
        if len(again.plan.stages) > 1 and not what:
            shown_parts = [*explain_pipeline(pipeline), *shown_parts]
            data["pipeline"] = pipeline_object(pipeline)
    return shown_parts, data


def other_memory(folder: Path, sizes: str) -> tuple[list[RenderableType], dict[str, Any]]:
    """Tables and object of ``autopar explain --memory``.

    Raises `PlanFolderError`, `UserError` for what is no size.
    """
    from autopar.report.memories import bought, memory_objects, memory_table

    asked = [round(_size(text)) for text in sizes.split(",")]
    own = plan_folder.read_cluster(folder).device.memory_bytes
    progress(f"planning for devices of {sizes} and of what there is")
    rows = bought(folder, asked)
    return memory_table(rows, own), {"by_memory": memory_objects(rows)}


def _size(text: str) -> float:
    from autopar.cost_models.units import UnitError, parse_quantity

    try:
        return parse_quantity(text.strip(), "size_bytes")
    except UnitError as error:
        raise UserError(f"--memory {text}: {error}") from None


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
