"""What published software does with a layer's graph, against the matrices and passes that papers
count; what its pipelines take and hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.rates import fitted
from autopar.cost_models.software import Software
from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch, Matrix
from autopar.nouns.cluster import DeviceGroup
from autopar.nouns.layout import Layout
from autopar.nouns.recompute import Recompute
from autopar.nouns.style import STYLES, Style
from autopar.pipeline.actions import Action
from autopar.pipeline.play import Costs, play
from autopar.pipeline.schedules.table import SCHEDULES, schedule
from autopar.planner.family.pins import RECOMPUTES
from autopar.planner.family.runs import KEY_TILE, TrainingRun, _staged, memory_of, step_of
from autopar.planner.family.stages import layers_of
from autopar.pricing.software.figures import Figures, Product
from autopar.pricing.software.memory import saved_bytes
from tests.cost_models.trained import NODE, ends_of, figures_of, trainer_of_run

LLAMA = Arch("l", 4, 4096, 32, 8, 14336, vocab=32000, seq=4096)
GPT = replace(LLAMA, kv_heads=32, ffn=16384, gated=False, positions=True, biases=False)
MIXTRAL = replace(LLAMA, experts=8, top_k=2)
SHARED = replace(MIXTRAL, shared_experts=1)
POD = load_cluster("examples/clusters/a100_128x8.yaml")


def written(matrix: Matrix, ways: int, rows: float) -> Product:
    """What one of ``ways`` ranks does of a product with a weight."""
    columns = matrix.outputs / ways if matrix.split == "out" else matrix.outputs
    depth = matrix.inputs / ways if matrix.split == "in" else matrix.inputs
    return Product(matrix.name, rows, columns, depth)


def flops(products: tuple[Product, ...] | list[Product]) -> float:
    return sum(p.flops for p in products)


@pytest.mark.parametrize("arch", [LLAMA, GPT, MIXTRAL, replace(LLAMA, causal=False, head_dim=64)])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("split", [True, False])
def test_a_layer_has_the_products_of_its_matrices(
    arch: Arch, style: Style, tp: int, split: bool
) -> None:
    layout = Layout(64, 3, tp=tp, sequence_parallel=split)
    software = Software(style=style)
    unit, ends = figures_of(arch, layout, software), ends_of(arch, layout, software)
    tokens = 3 * arch.seq
    matrices = [*arch.attention, *(arch.shared_mlp if arch.is_moe else arch.dense_mlp)]
    by_hand = [written(m, tp, tokens) for m in matrices]
    assert (flops(unit.products), len(unit.products)) == (flops(by_hand), len(by_hand))
    thin, thin_by_hand = (sum(p.flops * p.thinness for p in ps) for ps in (unit.products, by_hand))
    assert thin == pytest.approx(thin_by_hand)
    seen = arch.seq / 2 if arch.causal else arch.seq
    attention = 4 * tokens * seen * arch.heads * arch.dim / tp
    assert unit.attention is not None
    assert unit.attention.flops == pytest.approx(attention, rel=1e-3)
    assert (unit.attention.keys, unit.attention.rows) == (arch.seq, tokens * arch.heads / tp)
    assert unit.attention.scores == tokens * arch.seq * arch.heads / tp
    assert (unit.attention.hops, unit.attention.moved, unit.attention.moved_back) == (0, (), ())
    own = arch.moe_layer_parameters[0] if arch.is_moe else arch.dense_layer_parameters
    stored = own + arch.hidden * arch.experts * (tp - 1)  # routers are whole
    norms = (2 if arch.gated else 4) * arch.hidden
    assert unit.parameters == stored / tp + norms
    assert ends.head == Product("head", tokens, arch.vocab / tp, arch.hidden)
    rows = max(arch.vocab / tp, arch.seq * arch.positions)  # of a table; that of positions is whole
    assert ends.largest == rows * arch.hidden


@pytest.mark.parametrize("arch", [LLAMA, GPT])
@pytest.mark.parametrize("tp", [1, 8])
def test_norms_and_residuals_pass_over_the_stream_ten_times(arch: Arch, tp: int) -> None:
    """Two norms and two additions, forward: Korthikanti et al. 2022, section 4."""
    unit = figures_of(arch, Layout(64, 1, tp=tp), Software())
    assert unit.traffic.hidden == pytest.approx(2 * arch.seq * arch.hidden * 10 / tp, rel=0.06)


@pytest.mark.parametrize(("arch", "times"), [(LLAMA, 2), (MIXTRAL, 1), (SHARED, 2)])
def test_tensor_ranks_meet_around_attention_and_the_mlp(arch: Arch, times: int) -> None:
    """Where each rank routes tokens of its own, nothing is gathered for the experts here."""
    moved = figures_of(arch, Layout(64, 1, tp=8), Software()).moved
    hidden_bytes = 2.0 * arch.seq * arch.hidden
    assert {size for _, size in moved} == {hidden_bytes}
    assert Counter(kind for kind, _ in moved) == {"all_gather": times, "reduce_scatter": times}
    whole = figures_of(arch, Layout(64, 1, tp=8, sequence_parallel=False), Software()).moved
    assert whole == (("all_reduce", hidden_bytes),) * 2


def test_kinds_of_layers_are_told_apart() -> None:
    """Two of four layers see a window; two of four have one MLP, the others experts."""
    windowed = replace(LLAMA, windowed_layers=2, window=1024 - KEY_TILE)
    layout = Layout(64)
    near, far = (
        figures_of(windowed, layout, Software(), kind).attention
        for kind in ("WindowedLayer", "Layer")
    )
    assert near is not None
    assert far is not None
    assert near.flops < 0.5 * far.flops
    assert (near.keys, far.keys) == (1024, 4096)
    dense = replace(MIXTRAL, dense_layers=2, dense_ffn=LLAMA.ffn)
    kinds: list[Figures] = [
        figures_of(dense, layout, Software(), kind) for kind in ("DenseLayer", "Layer")
    ]
    assert kinds[0].experts is None
    assert kinds[1].experts is not None
    assert kinds[1].experts.parameters == 3 * 8 * LLAMA.hidden * LLAMA.ffn
    assert flops(kinds[0].products) == flops(figures_of(LLAMA, layout, Software()).products)


def test_ranks_of_a_sequence_share_its_work() -> None:
    whole, part = (figures_of(LLAMA, Layout(64, cp=cp), Software()) for cp in (1, 4))
    assert whole.attention is not None
    assert part.attention is not None
    assert part.attention.flops == whole.attention.flops / 4
    scales = 2 * 4 * LLAMA.hidden  # of two norms, which every rank reads whole in float32
    assert part.traffic.total - scales == (whole.traffic.total - scales) / 4
    assert part.parameters == whole.parameters
    assert ends_of(LLAMA, Layout(64, cp=4), Software()).logits == 16 * 4096 * 32000 / 16 / 4


@pytest.mark.parametrize("tp", [1, 2])
def test_what_ranks_of_a_sequence_exchange_follows_from_how_they_attend(tp: int) -> None:
    arch, cp = LLAMA, 4
    layout = Layout(64, 2, tp=tp, cp=cp)
    every = [
        figures_of(arch, layout, Software(context=context))
        for context in ("ring", "gather", "heads")
    ]
    assert every[0].moved == every[1].moved == every[2].moved
    ring, gather, heads = (figures.attention for figures in every)
    assert ring is not None
    assert gather is not None
    assert heads is not None
    tokens = 2 * arch.seq
    queries, keys = (2 * tokens * n * arch.dim / tp for n in (arch.heads, arch.kv_heads))
    # A ring's keys come piece by piece; n - 1 times both keys and values go on.
    assert (ring.keys, gather.keys, heads.keys) == (arch.seq / cp, arch.seq, arch.seq)
    assert (ring.hops, ring.hop_bytes) == (cp - 1, 2 * keys / cp)
    assert (ring.moved, ring.moved_back, gather.hops, heads.hops) == ((), (), 0, 0)
    assert gather.moved == (("all_gather", keys),) * 2
    assert gather.moved_back == (("reduce_scatter", keys),) * 2
    # Queries, keys and values come by heads, and what is made of them goes back by rows.
    traded = sorted(("all_to_all", size / cp) for size in (queries, queries, keys, keys))
    assert sorted(heads.moved) == sorted(heads.moved_back) == traded
    # Each has the work of its share: rows lie in zigzag.
    assert ring.flops == pytest.approx(gather.flops) == pytest.approx(heads.flops)
    assert ring.scores == gather.scores == heads.scores


@pytest.mark.parametrize("arch", [LLAMA, GPT, MIXTRAL])
def test_what_a_layer_keeps_shrinks_with_what_it_runs_again(arch: Arch) -> None:
    software = Software(attention="unfused")
    for tp, split in ((1, True), (8, True), (8, False)):
        sizes = []
        for recompute in RECOMPUTES:
            layout = Layout(64, 3, tp=tp, sequence_parallel=split, recompute=recompute)
            trainer = trainer_of_run(arch, NODE, layout, software)
            sizes.append(saved_bytes(figures_of(arch, layout, software), trainer))
        assert sizes[0] > sizes[1] > sizes[2]
        assert sizes[2] == 2 * 3 * arch.seq * arch.hidden / (tp if split else 1)


def test_scores_of_unfused_attention_are_computed_whole() -> None:
    fused, unfused = (
        figures_of(LLAMA, Layout(64), Software(attention=kernel)).attention
        for kernel in ("flash", "unfused")
    )
    assert fused is not None
    assert unfused is not None
    assert unfused.flops == pytest.approx(2 * fused.flops, rel=1e-3)


def test_ranks_that_share_a_head_of_keys_have_it_each() -> None:
    one, shared = (
        figures_of(replace(LLAMA, kv_heads=heads), Layout(64, 1, tp=8), Software())
        for heads in (8, 2)
    )
    assert one.products == shared.products


def test_every_second_product_is_kept_under_selective_checkpointing() -> None:
    """Of Llama 3 8B: the input, q, v, gate, down and what attention gives, 31,744 values of a
    token, and a sum for each of its rows."""
    arch = replace(LLAMA, vocab=128256)
    saved = figures_of(arch, Layout(64, 1), Software()).saved
    assert saved.every_second == arch.seq * (2 * 31744 + 4 * arch.heads)


def on(layout: Layout, arch: Arch, software: Software) -> TrainingRun:
    pod = replace(POD, groups=(DeviceGroup(POD.device, layout.device_count),))
    return TrainingRun(arch, pod, layout, software, "bf16")


def test_fsdp_keeps_gradients_whole_between_the_passes_of_a_pipeline() -> None:
    """Per parameter of a rank: 2 gathered, 4 summed up, and 12 of the 64 ranks that share."""
    layout = Layout(512, 1, dp_shard=64, pp=2, zero=1)
    run = on(layout, replace(LLAMA, layers=8), Software(states="fsdp"))
    for memory in memory_of(run):
        numel = memory.gradients / 4
        assert memory.parameters == pytest.approx(numel * (2 + 4 / 64))
        assert memory.optimizer == pytest.approx(numel * 8 / 64)


@given(st.integers(1, 200), st.integers(1, 64))
def test_layers_are_spread_evenly(layers: int, stages: int) -> None:
    counts = layers_of(layers, stages)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_the_ends_have_fewer() -> None:
    assert layers_of(126, 16) == (7, *[8] * 14, 7)
    assert layers_of(30, 32) == (0, *[1] * 30, 0)
    assert layers_of(31, 8) == (*[4] * 7, 3)


def seconds(layout: Layout, software: Software, layers: int = 32) -> float:
    return float(step_of(on(layout, replace(LLAMA, layers=layers), software)).total_s)


def test_schedules_stand_in_their_order() -> None:
    """Zero bubble before interleaved before 1F1B (Qi et al. 2023, table 4)."""
    times = [
        seconds(Layout(32, pp=8, schedule=name, interleave=interleave), Software())
        for name, interleave in (("zb-v", 1), ("interleaved-1f1b", 2), ("1f1b", 1))
    ]
    assert times == sorted(times)


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_a_pipeline_no_schedule_changes_anything(name: str) -> None:
    one, other = (on(Layout(64, schedule=s), LLAMA, Software()) for s in ("1f1b", name))
    assert step_of(other) == step_of(one)
    assert [m.total for m in memory_of(other)] == [m.total for m in memory_of(one)]


def test_activations_of_experts_that_run_again_cost_their_time() -> None:
    layouts = [
        Layout(64, dp_shard=8, ep=8, recompute=Recompute.parse(text))
        for text in (
            "none",
            "selective(layernorm)",
            "selective(layernorm+moe_act)",
            "selective(moe)",
        )
    ]
    times = [float(step_of(on(x, MIXTRAL, Software())).total_s) for x in layouts]
    assert times == sorted(set(times))


@pytest.mark.parametrize("layout", [Layout(64), Layout(64, pp=4), Layout(64, dp_shard=8, zero=3)])
@pytest.mark.parametrize("sets", [1, 3])
def test_many_sets_of_constants_are_priced_at_once(layout: Layout, sets: int) -> None:
    run = on(layout, LLAMA, Software())
    several: dict[str, Any] = {name: np.full(sets, value) for name, value in fitted().items()}
    priced = np.ravel(step_of(run, several).total_s)
    assert len(priced) == sets
    assert priced == pytest.approx(step_of(run).total_s)


def test_steps_that_overlap_hide_the_fill() -> None:
    layout = Layout(64, pp=8, schedule="zb-h2")
    assert seconds(layout, Software(steps_overlap=True)) < 0.985 * seconds(layout, Software())


def test_sends_that_wait_hold_stages_up() -> None:
    layout = Layout(64, pp=8)
    beside, waiting = (seconds(layout, Software(p2p_overlap=flag)) for flag in (True, False))
    assert beside < waiting < 1.05 * beside


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zb-v", 1), ("interleaved-1f1b", 2)]),
    st.sampled_from([2, 4]),
    st.sampled_from([8, 64]),
)
def test_a_long_schedule_is_priced_as_it_is_played(
    named: tuple[str, int], pp: int, microbatches: int
) -> None:
    """The steady state that few microbatches show, against all of them played one by one."""
    name, interleave = named
    layout = Layout(microbatches, pp=pp, schedule=name, interleave=interleave, zero=0)
    run = on(layout, replace(LLAMA, layers=16), Software(graphs=True))
    made = schedule(name, pp, microbatches, interleave)
    played = play(made, costs_of(run))
    r = trainer_of_run(run.arch, run.cluster, layout, run.software).rates
    own_s = r.step_s + float(step_of(run).optimizer_s)
    assert float(step_of(run).total_s) == pytest.approx(played.step_s + own_s, rel=0.015)


def costs_of(run: TrainingRun) -> Costs:
    """Of every action of a run's stages, as `play` asks for them."""
    staged = _staged(run)
    times = [staged.stages.time(*units) for units in staged.runs]
    sent = staged.stages.sent(staged.runs, staged.order.schedule)

    def action_s(action: Action) -> float:
        time = times[action.stage]
        if action.kind == "F":
            return float(time.forward_s)
        if action.kind == "W":
            return float(time.weights_s)
        return float(time.backward_s - (time.weights_s if action.kind == "I" else 0.0))

    def send_s(source: int, target: int) -> float:
        pair = min(source, target), max(source, target)
        return float(sent.between(staged.order.schedule, [pair])[0, 0])

    return Costs(action_s, send_s, reduce_s=lambda stage: float(times[stage].reduce_s))


@pytest.mark.parametrize(
    ("name", "interleave", "microbatches", "held"),
    [
        ("1f1b", 1, 16, (4, 3, 2, 1)),
        ("1f1b", 1, 2, (2, 2, 2, 1)),
        ("gpipe", 1, 64, (64, 64, 64, 64)),
        ("zb-h2", 1, 64, (7, 7, 7, 7)),
        ("zb-v", 1, 64, (4, 4, 4, 4)),
        ("interleaved-1f1b", 2, 16, (5.5, 4.5, 3.5, 2.5)),
    ],
)
def test_microbatches_in_flight(
    name: str, interleave: int, microbatches: int, held: tuple[float, ...]
) -> None:
    """In shares of what a rank keeps of one microbatch."""
    layout = Layout(microbatches, pp=4, schedule=name, interleave=interleave)
    run = on(layout, replace(LLAMA, layers=16), Software())
    trainer = trainer_of_run(run.arch, run.cluster, layout, run.software)
    layer = saved_bytes(figures_of(run.arch, Layout(64), run.software), trainer)
    passing = [m.activations - n * 4 * layer for m, n in zip(memory_of(run), held, strict=True)]
    *inner, last = sorted(passing)  # beside what one backward makes, and the loss
    assert 0 < min(passing)
    assert max(inner) < layer
    assert last < layer + 12.5 * LLAMA.seq * LLAMA.vocab
