"""What ``autopar explain`` does with a plan folder."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.commands import changed_cluster
from autopar.cli.progress import progress
from autopar.files import plan_folder, whole_file
from autopar.nouns.axes import PIPELINE
from autopar.nouns.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopar.report.explained import Explained
    from autopar.report.revisit import Revisited


def explanation(
    folder: Path, what: str | None, trace: Path | None = None
) -> tuple[list[RenderableType], dict[str, Any]]:
    """Tables and object of ``autopar explain``; the timeline goes to ``trace``.

    Raises `PlanFolderError`.
    """
    from autopar.report.alternatives import alternatives
    from autopar.report.explain import explain, explain_object
    from autopar.report.explained import state_moved, streamed
    from autopar.report.revisit import open_folder
    from autopar.report.torus import axes_on_torus, torus_lines, torus_object

    again = open_folder(folder)
    if changed := changed_cluster(folder, again.plan):
        progress(f"note: {changed}. What follows is of the cluster as it was")
    rows = _rows(again, what or "")
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


def _rows(again: Revisited, what: str) -> list[Explained]:
    """Of ops and parameters with ``what`` in their key. Raises `UserError` where none has."""
    from autopar.report.explained import explained

    every = explained(again.lowered, again.prices)
    if rows := [row for row in every if what in row.key]:
        return rows
    has = dict.fromkeys(row.key for row in every)
    near = difflib.get_close_matches(what, has, 5, 0.3) or list(has)[:5]
    raise UserError(
        f"--op {what}: none of the {len(has)} ops and parameters that do something has that in "
        f"its key; there are {', '.join(near)} and others"
    )


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
