"""A layout of a dense transformer priced as the planner prices its plans: from the model's graph.

The graph is made from the figures (`family.arch_graph`), sharded as published software
does it (`family.megatron`), and lowered, summed up and played as that of a captured model.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.family import Arch
from autopar.cost_models.layout import Layout
from autopar.cost_models.pipeline_time import layers_of
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import Lowered, lower
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Memory
from autopar.nouns.recompute import Recompute
from autopar.nouns.style import Style
from autopar.pipeline.schedules.table import schedule
from autopar.planner.family.arch_graph import BATCH_DIMS, graph_of
from autopar.planner.family.megatron import spread_of
from autopar.pricing.memory import step_memory
from autopar.pricing.pipeline import CutModel, PipelinePrices, runs_of
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Ends, Order
from autopar.pricing.simulation import StepTime, simulate
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import Summary, summarise
from autopar.rules.cut import batch_cut
from autopar.rules.fusion import ALONE, fusion

PRECISION = "bfloat16"


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner says of a layout; ``memory`` is of the rank that needs most. first_s: of the
    first gathers of all stages, which come one after the other."""

    lowered: Lowered
    prices: Prices
    summary: Summary
    time: StepTime
    memory: Memory
    first_s: float = 0.0


def planned(arch: Arch, layout: Layout, cluster: Cluster, style: Style) -> Planned:
    """Prices ``layout``, which must be legal and have neither cp, ep nor selective recompute, with
    parameters in float32, products in bfloat16 and AdamW.

    Raises:
        NoGraph: figures that no graph says.
    """
    x = layout
    graph = at_precision(graph_of(arch, x.global_batch), PRECISION)
    mesh = Mesh(("dp_replicate", "dp_shard", "tp"), (x.dp_replicate, x.dp_shard, x.tp))
    spread = spread_of(graph, mesh, x.sequence_parallel)
    lowered = lower(graph, spread, x.microbatches, batch_cut(graph, BATCH_DIMS))
    fused = fusion(graph) if style == "compiled" else ALONE
    prices = Prices(cluster, lowered.mesh, PRECISION, fused)
    summary = summarise(lowered, prices)
    state = StateSharding(x.zero, mesh, x.microbatches, PRECISION, clips=True)
    recompute = Recompute(x.recompute)
    if x.pp == 1:
        time = simulate(summary, state, cluster, recompute)
        memory = step_memory(summary, state, recompute, cluster.device)
        return Planned(lowered, prices, summary, time, memory)
    cuts = CutModel(lowered, summary, prices, "torch")
    of_stages = PipelinePrices(cuts, cluster, state, recompute, x.pp)
    order = Order(schedule(x.schedule, x.pp, x.microbatches, x.interleave))
    runs = runs_of(_ends(cuts, arch, x), order.schedule)
    time = of_stages.step(runs, order.schedule, *of_stages.clocked(runs, order))
    ranks = of_stages.memory(runs, order.schedule)
    first_s = sum(of_stages.at(stage).time(*run).first_s for stage, run in enumerate(runs))
    most = max(ranks, key=lambda rank: rank.total)
    return Planned(lowered, prices, summary, time, most, first_s)


def _ends(cuts: CutModel, arch: Arch, layout: Layout) -> Ends:
    """Layers as even as they can be, what stands before them in the first stage and the rest in the
    last."""
    blocks = [op.op.name for op in cuts.lowered.ops if op.bound is None]
    before = cuts.units.index(blocks[0])
    ends = []
    for layers in layers_of(arch.layers, layout.pipeline(arch.layers).stages):
        before += layers
        ends.append(before)
    return (*ends[:-1], len(cuts.units))
