"""The one way from a plan and its graph to all that is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.lowering.lowered import Lowered, LoweredOp, LoweringError
from autopar.lowering.placed_experts import check_placement
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import lower
from autopar.nouns.axes import SEQUENCES
from autopar.nouns.batch import BatchEntry
from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan, key
from autopar.nouns.recipes import ALIGNED
from autopar.rules.cut import BatchCut, batch_cut
from autopar.rules.feed_forwards import with_mlp_chunks
from autopar.rules.implementations.kernels import ATTR
from autopar.rules.kept_whole import keep_whole
from autopar.rules.kernels import kernels_in, with_kernels, wrong_kernels
from autopar.rules.loss_heads import in_chunks
from autopar.rules.narrow import local_of, narrow_of, possible, with_recipes
from autopar.rules.pieces import BatchMixed
from autopar.rules.uneven_routes import as_placed, with_imbalance


def planned_graph(plan: Plan, captured: Graph) -> Graph:
    """The graph that the plan is of: in its precision, with what it keeps whole, how unevenly
    routes go to experts, its layers in 8 bits, what its ops run by, its MLPs and loss in chunks.

    Raises `LoweringError` for a recipe or kernel that the op that it is named for cannot run by.
    """
    graph = at_precision(keep_whole(captured, plan.replicated_ops), plan.precision)
    graph = with_mlp_chunks(graph, plan.mlp_chunks)
    for where, against in wrong_kernels(graph, plan.kernels):
        raise LoweringError(f"kernels.{where} is {plan.kernels[where]!r}, and {against}")
    order = as_placed(plan.expert_placement)
    graph = with_imbalance(graph, plan.expert_imbalance, order, plan.device_count)
    graph = with_kernels(graph, plan.kernels)
    try:
        graph = with_recipes(graph, plan.recipes)
    except KeyError as error:
        raise LoweringError(
            f"recipes[{error}]: the model has no linear layer of that name that may run in 8 bits"
        ) from None
    graph = in_chunks(graph, plan.loss_chunks)
    for where in sorted(plan.kernels.keys() - kernels_in(graph).keys()):
        raise LoweringError(f"kernels.{where}: logits are made whole, so nothing runs by it")
    return graph


def batch_dims(batch: Iterable[BatchEntry]) -> dict[str, int]:
    """The batch dim of every entry that is split."""
    return {entry.name: entry.batch_dim for entry in batch if entry.batch_dim is not None}


def lowered_plan(plan: Plan, graph: Graph, dims: dict[str, int]) -> Lowered:
    """What follows from ``plan`` for a `planned_graph`. Raises `LoweringError`."""
    lowered = lower(graph, plan.spreads[0], plan.microbatches, plan_cut(plan, graph, dims))
    check_placement(lowered, plan.expert_placement)
    check_recipes(lowered)
    for where in kernels_beside_calls(lowered):
        raise LoweringError(
            f"kernels.{where} is {plan.kernels[where]!r}, but rows of that attention are split, "
            "which is a call of its own"
        )
    return lowered


def kernels_beside_calls(lowered: Lowered) -> dict[str, LoweredOp]:
    """By key, attentions that name a kernel and run by a call of their own."""
    parts = ((None, lowered), *lowered.blocks.items())
    every = ((key(name, op.op.name), op) for name, part in parts for op in part.ops)
    return {
        where: op
        for where, op in every
        if op.op.kind == "attention" and ATTR in op.op.attrs and op.implementations
    }


def check_recipes(lowered: Lowered) -> None:
    """Raises `LoweringError` for a product that cannot be narrow on its pieces."""
    for part in (lowered, *lowered.blocks.values()):
        for op in part.ops:
            narrow = narrow_of(op.op)
            if narrow is None or op.bound is None:
                continue
            wanted = op.operands[0].differentiable, op.operands[1].differentiable
            local = local_of(op.op, op.bound, op.strategy, part.mesh)
            may = possible(local, narrow, op.strategy, wanted)
            if wrong := [product for product in narrow.products if product not in may]:
                raise LoweringError(
                    f"recipes[{key(part.block, op.op.name)!r}]={narrow}: {' and '.join(wrong)} "
                    f"cannot be narrow on a rank, where the layer is {local} under {op.strategy}: "
                    f"sizes are to be multiples of {max(ALIGNED, narrow.recipe.block)}, and what "
                    "is rounded no partial sum"
                )


def plan_cut(plan: Plan, graph: Graph, dims: Mapping[str, int]) -> BatchCut:
    """How the axes of the plan's mesh cut the batch. ``graph``: a `planned_graph`.

    Raises `LoweringError` where they cannot.
    """
    ways = max(spread.mesh.ways(SEQUENCES) for spread in plan.spreads)
    try:
        return batch_cut(graph, dims, ways, plan.seq_slices or 1)
    except BatchMixed as error:
        asked = f"cp={ways}" if ways > 1 else f"seq_slices={plan.seq_slices}"
        raise LoweringError(f"{asked}: {error}") from error
