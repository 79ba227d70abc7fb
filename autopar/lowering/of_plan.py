"""The one way from a plan and its graph to all that is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.lowering.lowered import Lowered, LoweringError
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import lower
from autopar.nouns.axes import SEQUENCES
from autopar.nouns.batch import BatchEntry
from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan
from autopar.rules.cut import BatchCut, batch_cut
from autopar.rules.kept_whole import keep_whole
from autopar.rules.kernels import with_kernels, wrong_kernels
from autopar.rules.loss_heads import in_chunks
from autopar.rules.pieces import BatchMixed
from autopar.rules.uneven_routes import with_imbalance


def planned_graph(plan: Plan, captured: Graph) -> Graph:
    """The graph that the plan is of: in its precision, with what it keeps whole, how unevenly
    routes go to experts, what its ops run by, and its loss in chunks.

    Raises `LoweringError` for a kernel that the op that it is named for cannot run by.
    """
    graph = at_precision(keep_whole(captured, plan.replicated_ops), plan.precision)
    for where, may in wrong_kernels(graph, plan.kernels):
        raise LoweringError(f"kernels.{where} is {plan.kernels[where]!r}, and may be {may}")
    graph = with_kernels(with_imbalance(graph, plan.expert_imbalance), plan.kernels)
    return in_chunks(graph, plan.loss_chunks)


def batch_dims(batch: Iterable[BatchEntry]) -> dict[str, int]:
    """The batch dim of every entry that is split."""
    return {entry.name: entry.batch_dim for entry in batch if entry.batch_dim is not None}


def lowered_plan(plan: Plan, graph: Graph, dims: dict[str, int]) -> Lowered:
    """What follows from ``plan`` for a `planned_graph`. Raises `LoweringError`."""
    return lower(graph, plan.spreads[0], plan.microbatches, plan_cut(plan, graph, dims))


def plan_cut(plan: Plan, graph: Graph, dims: Mapping[str, int]) -> BatchCut:
    """How the axes of the plan's mesh cut the batch. ``graph``: a `planned_graph`.

    Raises `LoweringError` where they cannot.
    """
    ways = max(spread.mesh.ways(SEQUENCES) for spread in plan.spreads)
    if plan.framework == "jax" and ways > 1:
        raise LoweringError(f"cp={ways}: JAX programs keep sequences whole")
    try:
        return batch_cut(graph, dims, ways)
    except BatchMixed as error:
        raise LoweringError(f"cp={ways}: {error}") from error
