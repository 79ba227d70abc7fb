"""A layer's figures read off its graph are those of the formulas, where both say the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.family import Arch
from autopar.cost_models.footprint import saved_bytes
from autopar.cost_models.layer_figures import LayerFigures, by_formulas
from autopar.cost_models.layer_products import Products
from autopar.cost_models.software import Software
from autopar.nouns.layout import Layout
from autopar.nouns.recompute import Recompute
from autopar.nouns.style import Style
from autopar.planner.family.graph_figures import figures_of, no_graph

LLAMA = Arch("l", 4, 4096, 32, 8, 14336, vocab=32000, seq=4096)
GPT = replace(LLAMA, kv_heads=32, ffn=16384, gated=False, positions=True, biases=False)


def both(arch: Arch, layout: Layout, software: Software) -> tuple[LayerFigures, LayerFigures]:
    return figures_of(arch, layout, software, "bf16"), by_formulas(arch, layout, software, 2)


@pytest.mark.parametrize("arch", [LLAMA, GPT, replace(LLAMA, causal=False, head_dim=64)])
@pytest.mark.parametrize("style", ["eager", "compiled"])
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("split", [True, False])
def test_graph_and_formulas_agree(arch: Arch, style: Style, tp: int, split: bool) -> None:
    layout = Layout(64, 3, tp=tp, sequence_parallel=split)
    graph, formulas = both(arch, layout, Software(style=style))
    read, written = Products(graph.products), Products(formulas.products)
    assert (read.flops, read.count) == (written.flops, written.count)
    assert read.thin == pytest.approx(written.thin)
    assert graph.attention_flops == pytest.approx(formulas.attention_flops, rel=1e-3)
    assert graph.traffic.total == pytest.approx(formulas.traffic.total, rel=0.06)
    assert graph.traffic_back == pytest.approx(formulas.traffic_back, rel=0.06)
    assert sorted(graph.moved) == sorted(formulas.moved)
    assert graph.parameters == pytest.approx(formulas.parameters, rel=1e-3)
    assert (graph.head, graph.table) == (formulas.head, formulas.table)


@pytest.mark.parametrize("arch", [LLAMA, GPT])
@pytest.mark.parametrize(
    ("style", "recompute"),
    [("eager", "none"), ("compiled", "none"), ("compiled", "selective"), ("compiled", "full")],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_what_a_layer_keeps_is_what_the_formulas_count(
    arch: Arch, style: Style, recompute: str, precision: str
) -> None:
    for software in (
        Software(style=style, attention="unfused", dropout=True),
        Software(style=style, selective="ops"),
    ):
        for tp, split in ((1, True), (8, True), (8, False)):
            layout = Layout(64, 3, tp=tp, sequence_parallel=split, recompute=Recompute(recompute))
            kept = figures_of(arch, layout, software, precision).saved
            graph, formulas = (
                saved_bytes(arch, layout, software, precision=precision, kept=saved)
                for saved in (kept, None)
            )
            assert graph == pytest.approx(formulas, rel=5e-3)


def test_scores_of_unfused_attention_are_computed_whole() -> None:
    layout = Layout(64, 1)
    fused, unfused = (
        figures_of(LLAMA, layout, Software(attention=kernel), "bf16")
        for kernel in ("flash", "unfused")
    )
    assert unfused.attention_flops == pytest.approx(2 * fused.attention_flops, rel=1e-3)


def test_ranks_that_share_a_head_of_keys_have_it_each() -> None:
    one, shared = (
        figures_of(replace(LLAMA, kv_heads=heads), Layout(64, 1, tp=8), Software(), "bf16")
        for heads in (8, 2)
    )
    assert one.products == shared.products


@pytest.mark.parametrize(
    ("arch", "layout", "missing"),
    [
        (LLAMA, Layout(64, 1, tp=8), ""),
        (LLAMA, Layout(64, 1, cp=2), "cp"),
        (replace(LLAMA, experts=8, top_k=2), Layout(64, 1), "experts"),
        (
            replace(LLAMA, windowed_layers=2, window=8),
            Layout(64, 1, cp=2),
            "windows of attention, cp",
        ),
    ],
)
def test_the_formulas_price_what_no_graph_says(arch: Arch, layout: Layout, missing: str) -> None:
    assert no_graph(arch, layout) == missing
    graph, formulas = both(arch, layout, Software())
    assert (graph == formulas) == bool(missing)
