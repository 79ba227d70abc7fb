"""A layer's figures read off its graph, against the matrices and passes that papers count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.family import Arch
from autopar.cost_models.footprint import saved_bytes
from autopar.cost_models.layer_figures import KEY_TILE, LayerFigures
from autopar.cost_models.layer_products import Product, Products, split_product
from autopar.cost_models.software import Software
from autopar.nouns.layout import Layout
from autopar.nouns.style import Style
from autopar.planner.family.graph_figures import figures_of
from autopar.planner.family.layouts import footprint_of
from autopar.planner.family.pins import RECOMPUTES

LLAMA = Arch("l", 4, 4096, 32, 8, 14336, vocab=32000, seq=4096)
GPT = replace(LLAMA, kv_heads=32, ffn=16384, gated=False, positions=True, biases=False)
MIXTRAL = replace(LLAMA, experts=8, top_k=2)
SHARED = replace(MIXTRAL, shared_experts=1)


def layer(arch: Arch, layout: Layout, software: Software) -> LayerFigures:
    return figures_of(arch, layout, software, "bf16").layer


@pytest.mark.parametrize("arch", [LLAMA, GPT, MIXTRAL, replace(LLAMA, causal=False, head_dim=64)])
@pytest.mark.parametrize("style", ["eager", "compiled"])
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("split", [True, False])
def test_a_layer_has_the_products_of_its_matrices(
    arch: Arch, style: Style, tp: int, split: bool
) -> None:
    layout = Layout(64, 3, tp=tp, sequence_parallel=split)
    read, tokens = layer(arch, layout, Software(style=style)), 3 * arch.seq
    matrices = [*arch.attention, *(arch.shared_mlp if arch.is_moe else arch.dense_mlp)]
    written = Products(split_product(m, tp, tokens, 1.0) for m in matrices)
    products = Products(read.products)
    assert (products.flops, products.count) == (written.flops, written.count)
    assert products.thin == pytest.approx(written.thin)
    seen = arch.seq / 2 if arch.causal else arch.seq
    attention = 4 * tokens * seen * arch.heads * arch.dim / tp
    assert read.attention_flops == pytest.approx(attention, rel=1e-3)
    stored = arch.layer_parameters[0] + arch.hidden * arch.experts * (tp - 1)  # routers are whole
    norms = (2 if arch.gated else 4) * arch.hidden
    assert read.parameters == stored / tp + norms
    assert read.head == Product(tokens, arch.vocab / tp, arch.hidden)
    assert read.table == arch.vocab * arch.hidden / tp


@pytest.mark.parametrize("arch", [LLAMA, GPT])
@pytest.mark.parametrize("tp", [1, 8])
def test_norms_and_residuals_pass_over_the_stream_ten_times(arch: Arch, tp: int) -> None:
    """Two norms and two additions, forward: Korthikanti et al. 2022, section 4."""
    read = layer(arch, Layout(64, 1, tp=tp), Software())
    assert read.traffic.hidden == pytest.approx(2 * arch.seq * arch.hidden * 10 / tp, rel=0.06)


@pytest.mark.parametrize(("arch", "times"), [(LLAMA, 2.0), (MIXTRAL, 1.0), (SHARED, 2.0)])
def test_tensor_ranks_meet_around_attention_and_the_mlp(arch: Arch, times: float) -> None:
    """Where each rank routes tokens of its own, nothing is gathered for the experts here."""
    moved = layer(arch, Layout(64, 1, tp=8), Software()).moved
    hidden_bytes = 2.0 * arch.seq * arch.hidden
    count = {kind: 0.0 for kind, _, _ in moved}
    for kind, size, of in moved:
        assert size == hidden_bytes
        count[kind] += of
    assert count == {"all_gather": times, "reduce_scatter": times}
    whole = layer(arch, Layout(64, 1, tp=8, sequence_parallel=False), Software()).moved
    assert [(kind, size) for kind, size, _ in whole] == [("all_reduce", hidden_bytes)] * 2


def test_kinds_of_layers_are_averaged() -> None:
    """Two of four layers see a window; two of four have one MLP, the others experts."""
    windowed = replace(LLAMA, windowed_layers=2, window=1024 - KEY_TILE)
    near, far = (
        layer(replace(LLAMA, windowed_layers=n, window=1024 - KEY_TILE), Layout(64), Software())
        for n in (4, 0)
    )
    mixed = layer(windowed, Layout(64), Software())
    assert mixed.attention_flops == (near.attention_flops + far.attention_flops) / 2
    assert near.attention_flops < 0.5 * far.attention_flops
    dense = replace(MIXTRAL, dense_layers=2, dense_ffn=LLAMA.ffn)
    half = Products(layer(dense, Layout(64), Software()).products).flops
    ends = [Products(layer(a, Layout(64), Software()).products).flops for a in (MIXTRAL, LLAMA)]
    assert half == pytest.approx(sum(ends) / 2)


def test_ranks_of_a_sequence_share_its_work() -> None:
    whole, part = (layer(LLAMA, Layout(64, cp=cp), Software()) for cp in (1, 4))
    assert part.attention_flops == whole.attention_flops / 4
    assert part.traffic.total == whole.traffic.total / 4
    assert part.head.rows == whole.head.rows / 4
    assert part.parameters == whole.parameters


@pytest.mark.parametrize("arch", [LLAMA, GPT, MIXTRAL])
def test_what_a_layer_keeps_shrinks_with_what_it_runs_again(arch: Arch) -> None:
    for tp, split in ((1, True), (8, True), (8, False)):
        sizes = []
        for recompute in RECOMPUTES:
            layout = Layout(64, 3, tp=tp, sequence_parallel=split, recompute=recompute)
            software = Software(attention="unfused")
            kept = figures_of(arch, layout, software, "bf16").kept
            share = float(arch.is_moe)
            sizes.append(saved_bytes(arch, layout, software, share, "bf16", kept))
        assert sizes[0] > sizes[1] > sizes[2]
        assert sizes[2] == 2 * 3 * arch.seq * arch.hidden / (tp if split else 1)


def test_scores_of_unfused_attention_are_computed_whole() -> None:
    layout = Layout(64, 1)
    fused, unfused = (
        layer(LLAMA, layout, Software(attention=kernel)) for kernel in ("flash", "unfused")
    )
    assert unfused.attention_flops == pytest.approx(2 * fused.attention_flops, rel=1e-3)


def test_ranks_that_share_a_head_of_keys_have_it_each() -> None:
    one, shared = (
        layer(replace(LLAMA, kv_heads=heads), Layout(64, 1, tp=8), Software()) for heads in (8, 2)
    )
    assert one.products == shared.products


def test_every_second_product_is_kept_under_selective_checkpointing() -> None:
    """Of Llama 3 8B: the input, q, v, gate, down and what attention gives, 31,744 values of a
    token, and a sum for each of its rows."""
    arch = replace(LLAMA, vocab=128256)
    saved = layer(arch, Layout(64, 1), Software()).saved
    assert saved.every_second == arch.seq * (2 * 31744 + 4 * arch.heads)


def test_fsdp_keeps_gradients_whole_between_the_passes_of_a_pipeline() -> None:
    """Per parameter of a rank: 2 gathered, 4 summed up, and 12 of the 64 ranks that share."""
    software, arch = Software(states="fsdp"), replace(LLAMA, layers=8)
    layout = Layout(512, 1, dp_shard=64, pp=2, zero=1)
    held = footprint_of(arch, layout, software, "bf16")
    numel = held.gradients / 4
    assert held.parameters == numel * (2 + 4 / 64)
    assert held.optimizer == numel * 8 / 64
