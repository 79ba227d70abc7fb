"""``autopar show``: a model's graph, or a plan and what follows from it, as text."""

from __future__ import annotations

from pathlib import Path

from autopar.nouns.errors import UserError

FORMS = ("graph", "plan", "lowered")


def text_of(source: str, form: str | None, stage: int | None) -> str:
    """The text of a model's file or of a plan's folder.

    form:  one of `FORMS`; None: the graph of a model, all but the graph of a plan.
    stage: of a plan, the stage whose ops alone are wanted.

    Raises `UserError`.
    """
    if form not in (None, *FORMS):
        raise UserError(f"--as {form}: choose {', '.join(FORMS)}")
    if stage is not None and form not in (None, "lowered"):
        raise UserError(f"--stage is of what is lowered; --as {form} has all stages")
    if not Path(source).is_dir():
        return _of_model(source, form, stage)
    parts = [form] if form else ["lowered"] if stage is not None else ["plan", "lowered"]
    return "\n\n".join(_part(source, part, stage) for part in parts)


def _of_model(source: str, form: str | None, stage: int | None) -> str:
    from autopar.files.sources import relative_sources
    from autopar.frontends.dispatch import capture
    from autopar.frontends.loading import load_workload
    from autopar.nouns.text.graph import to_text

    if form not in (None, "graph") or stage is not None:
        raise UserError(
            f"{source} is a model, which has a graph alone; --as and --stage are for the folder "
            f"that `autopar plan {source} --cluster cluster.yaml -o plan` writes"
        )
    graph = capture(load_workload(source)).graph
    return to_text(relative_sources(graph, Path(source.partition(":")[0]).resolve().parent))


def _part(folder: str, form: str, stage: int | None) -> str:
    from autopar.files import plan_folder, plan_text
    from autopar.lowering import text as lowered_text
    from autopar.lowering.stages import CutError, stage_parts
    from autopar.nouns.text import graph as graph_text
    from autopar.report.opened import opened, refuse

    if form == "plan":
        return plan_text.to_text(plan_folder.read_plan(folder))
    if form == "graph":
        return graph_text.to_text(plan_folder.read_graph(folder))
    contents = opened(folder)
    if stage is None:
        return lowered_text.to_text(contents.lowered)
    if stage >= (stages := len(contents.plan.stages)):
        raise UserError(f"--stage {stage}: {folder} has stages 0 to {stages - 1}")
    try:
        return lowered_text.to_text(
            stage_parts(contents.lowered, contents.plan.stages)[stage].lowered
        )
    except CutError as error:
        refuse(folder, str(error))
