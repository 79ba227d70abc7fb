"""Layouts priced from what they share, against each lowered whole by itself."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.cost_models.family import Arch
from autopar.cost_models.pipeline_time import layers_of, pipeline_of
from autopar.files.arch_file import load_arch
from autopar.files.cluster_file import load_cluster
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import lower
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.nouns.mesh import Mesh
from autopar.nouns.style import Style
from autopar.pipeline.schedules.table import schedule
from autopar.planner.family.arch_prices import PRECISION, Pricer, unpriced
from autopar.planner.family.graph.model import BATCH_DIMS, graph_of
from autopar.planner.family.layouts import layouts
from autopar.planner.family.megatron import spread_of
from autopar.pricing.cut_model import CutModel
from autopar.pricing.pipeline import PipelinePrices, runs_of
from autopar.pricing.priced import Priced
from autopar.pricing.priced import price as alone
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Ends, Order
from autopar.pricing.state import StateSharding
from autopar.pricing.summary import summarise
from autopar.rules.cut import batch_cut
from autopar.rules.fusion import ALONE, fusion

DRAWN = 12
CASES = (("gpt3_175b", "a100_128x8", 1536), ("llama3_70b", "h100_32x8", 128))


@pytest.mark.parametrize("style", ["compiled", "eager"])
@pytest.mark.parametrize(("arch", "cluster", "batch"), CASES, ids=[case[0] for case in CASES])
def test_as_each_lowered_whole(arch: str, cluster: str, batch: int, style: Style) -> None:
    sizes, where = (
        load_arch(f"examples/archs/{arch}.yaml"),
        load_cluster(f"examples/clusters/{cluster}.yaml"),
    )
    draw = random.Random(0)
    known = [x for x in layouts(sizes, where, batch) if not unpriced(x)]
    price = Pricer(where, style)
    for drawn in draw.sample(known, DRAWN):
        layout = replace(drawn, sequence_parallel=draw.random() < 0.7)
        ours, theirs = price(sizes, layout), planned(sizes, layout, where, style)
        assert ours.time.total_s == pytest.approx(theirs.time.total_s, rel=1e-12), layout
        assert ours.memory == theirs.memory, layout
        assert ours.first_s == pytest.approx(theirs.first_s, rel=1e-12), layout


def planned(arch: Arch, layout: Layout, cluster: Cluster, style: Style) -> Priced:
    """``layout`` lowered whole, on every axis and microbatch, and priced as a search does."""
    x = layout
    graph = at_precision(graph_of(arch, x.global_batch), PRECISION)
    mesh = Mesh(("dp_replicate", "dp_shard", "tp"), (x.dp_replicate, x.dp_shard, x.tp))
    spread = spread_of(graph, mesh, x.sequence_parallel)
    lowered = lower(graph, spread, x.microbatches, batch_cut(graph, BATCH_DIMS))
    fused = fusion(graph) if style == "compiled" else ALONE
    prices = Prices(cluster, lowered.mesh, PRECISION, fused)
    summary = summarise(lowered, prices)
    state = StateSharding(x.zero, mesh, x.microbatches, PRECISION, clips=True)
    recompute = x.recompute
    if x.pp == 1:
        return alone(CutModel(lowered, summary, prices, "torch"), state, recompute)
    cuts = CutModel(lowered, summary, prices, "torch")
    of_stages = PipelinePrices(cuts, cluster, state, recompute, x.pp)
    order = Order(schedule(x.schedule, x.pp, x.microbatches, x.interleave))
    runs = runs_of(_ends(cuts, arch, x), order.schedule)
    time = of_stages.step(runs, order.schedule, *of_stages.clocked(runs, order))
    ranks = of_stages.memory(runs, order.schedule)
    first_s = sum(of_stages.at(stage).time(*run).first_s for stage, run in enumerate(runs))
    most = max(ranks, key=lambda rank: rank.total)
    return Priced(time, most, first_s)


def _ends(cuts: CutModel, arch: Arch, layout: Layout) -> Ends:
    """Layers as even as they can be, what stands before them in the first stage and the rest in the
    last."""
    blocks = [op.op.name for op in cuts.lowered.ops if op.bound is None]
    before = cuts.units.index(blocks[0])
    ends = []
    for layers in layers_of(arch.layers, pipeline_of(layout, arch.layers).stages):
        before += layers
        ends.append(before)
    return (*ends[:-1], len(cuts.units))
