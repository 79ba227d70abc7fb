"""A plan of one stage under a spread that is given, and what it is lowered to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import Lowered
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import lower
from autopar.nouns.axes import SEQUENCES
from autopar.nouns.plan import Plan, Spread, Stage
from autopar.nouns.recompute import Recompute
from autopar.rules.batch import batch_flow
from autopar.rules.cut import BatchCut, Cut, batch_cut
from tests.plans import plan as some_plan


def decided(
    captured: Captured, spread: Spread, microbatches: int = 1, **changes: Any
) -> tuple[Lowered, Plan]:
    """``changes``: other fields of the plan, or of its stage."""
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    # What cannot be cut is an error here, where a plan would have one data rank.
    samples = Cut(dims, batch_flow(captured.graph, dims).choices)
    along = batch_cut(captured.graph, dims, spread.mesh.ways(SEQUENCES)).sequences
    graph = at_precision(captured.graph, changes.get("precision", "float32"))
    lowered = lower(graph, spread, microbatches, BatchCut(samples, along))
    recompute = Recompute.parse(changes.pop("recompute", "none"))
    stage = Stage(zero=changes.pop("zero", 0), recompute=recompute)
    plan = replace(
        some_plan(),
        spreads=(spread,),
        stages=(stage,),
        microbatches=microbatches,
        **{"precision": "float32", **changes},
    )
    return lowered, plan
