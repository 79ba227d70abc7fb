"""What more or less memory would buy: plans of the same model on devices that have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.files import plan_folder
from autopar.nouns.layout import Pins
from autopar.planner.advice.memories import WithMemory, plans_by_memory
from autopar.planner.ask.question import Question
from autopar.planner.ask.sentences import layout_text
from autopar.report.opened import opened
from autopar.report.render import indented, table
from autopar.report.units import duration, size
from autopar.rules.batch import flow_or_obstacle
from autopar.rules.cut import Cut, Cuts
from autopar.rules.fusion import fusion


def asked_again(folder: str | Path) -> Question:
    """The question that a plan's folder answers, with nothing pinned. Raises `PlanFolderError`."""
    contents = opened(folder)
    plan, graph, dims = contents.plan, contents.graph, contents.batch_dims
    flow, obstacle = flow_or_obstacle(graph, dims)
    batched = [
        e.shape[e.batch_dim] for e in plan_folder.read_batch(folder) if e.batch_dim is not None
    ]
    return Question(
        graph=graph,
        cuts=Cuts(Cut(dims, flow.choices)),
        batch=batched[0] if batched else 1,
        obstacles=flow.obstacles,
        cluster=plan_folder.read_cluster(folder),
        precision=plan.precision,
        optimizer=plan.optimizer,
        pins=Pins(),
        uneven=plan.framework != "jax",
        splits_batch=obstacle is None,
        fusion=fusion(graph, plan.style),
        framework=plan.framework,
        clips=plan.clip_norm is not None,
    )


def bought(folder: str | Path, sizes: Sequence[int]) -> list[WithMemory]:
    """Plans for devices of these bytes, and of what they have. Raises `PlanFolderError`."""
    question = asked_again(folder)
    return [*plans_by_memory(question, [*sizes, question.cluster.device.memory_bytes])]


def memory_table(rows: Sequence[WithMemory], own_bytes: int) -> list[RenderableType]:
    """Step and layout by memory, beside those of the memory that there is."""
    own = next(row.best for row in rows if row.memory_bytes == own_bytes)
    shown = table("memory", "step", "against", "takes", "layout", right=("memory", "step", "takes"))
    for row in rows:
        name = size(row.memory_bytes) + (" (there is)" if row.memory_bytes == own_bytes else "")
        if row.best is None:
            shown.add_row(name, "", "", "", "nothing fits")
            continue
        step_s, against = row.best.priced.time.total_s, ""
        if own is not None and row.best is not own:
            against = f"{step_s / own.priced.time.total_s - 1:+.1%}"
        taken = size(row.best.priced.memory.total)
        shown.add_row(name, duration(step_s), against, taken, layout_text(row.best.decided))
    return [Text("What other memory would buy, with nothing pinned", style="bold"), indented(shown)]


def memory_objects(rows: Sequence[WithMemory]) -> list[dict[str, Any]]:
    """The same as JSON-like values."""
    return [
        {
            "memory_bytes": row.memory_bytes,
            "step_time_s": row.best.priced.time.total_s if row.best else None,
            "taken_bytes": row.best.priced.memory.total if row.best else None,
            "layout": layout_text(row.best.decided) if row.best else None,
        }
        for row in rows
    ]
