"""A plan's folder with all that follows from its decisions, before any price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from autopar.files import plan_folder
from autopar.lowering.lowered import Lowered, LoweringError
from autopar.lowering.of_plan import batch_dims, lowered_plan, planned_graph
from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan
from autopar.report.decisions import wrong_decision


@dataclass(frozen=True, slots=True)
class Opened:
    """``graph`` is in the plan's precision; ``batch_dims`` of the entries that are split."""

    plan: Plan
    graph: Graph
    batch_dims: Mapping[str, int]
    lowered: Lowered


def opened(folder: str | Path) -> Opened:
    """The plan in ``folder``; needs neither the model nor its framework.

    Raises `PlanFolderError`.
    """
    plan = plan_folder.read_plan(folder)
    try:
        graph = planned_graph(plan, plan_folder.read_graph(folder))
    except LoweringError as error:
        refuse(folder, str(error))
    dims = batch_dims(plan_folder.read_batch(folder))
    if wrong := wrong_decision(plan, graph):
        refuse(folder, wrong)
    try:
        return Opened(plan, graph, dims, lowered_plan(plan, graph, dims))
    except LoweringError as error:
        refuse(folder, str(error))


def refuse(folder: str | Path, wrong: str) -> NoReturn:
    """Raises `PlanFolderError`: the folder's plan cannot be."""
    raise plan_folder.PlanFolderError(
        f"{Path(folder) / plan_folder.PLAN}: {wrong}. Put it right, or plan the model again"
    )
