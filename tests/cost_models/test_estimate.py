"""Estimates: golden sizes, what must always hold, and refusals that show their numbers."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.overlap import exposed_s
from autopar.cost_models.rates import rates_of
from autopar.cost_models.software import Routing, Software
from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch
from autopar.frontends.family.arch_file import ArchFileError, load_arch
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.errors import UserError
from autopar.nouns.layout import Layout, LayoutError, Pins
from autopar.nouns.prediction import Memory
from autopar.nouns.recompute import ATTENTION, FULL, Recompute
from autopar.planner.family.estimate import estimate, estimate_files
from autopar.planner.family.legal import illegal
from autopar.planner.family.pins import RECOMPUTES, completed, parse_pins
from autopar.planner.family.runs import TrainingRun, memory_of, peak_bytes, run_on, step_s
from autopar.planner.family.sweep import _least_split, layouts, sweep
from autopar.pricing.software.memory import saved_bytes
from autopar.pricing.software.routed import routed_of
from autopar.pricing.software.states import spent
from autopar.report.estimates import render, to_json
from autopar.report.units import size
from tests.cost_models.trained import figures_of, held, trainer_of_run

ROOT = Path(__file__).parents[2]
LLAMA = load_arch(ROOT / "examples/archs/llama3_70b.yaml")
GPT3 = load_arch(ROOT / "examples/archs/gpt3_175b.yaml")
LLAMA_405B = load_arch(ROOT / "examples/archs/llama3_405b.yaml")
MIXTRAL = load_arch(ROOT / "examples/archs/mixtral_8x7b.yaml")
H100_64 = load_cluster(ROOT / "examples/clusters/h100_8x8.yaml")
SLOW_64 = replace(
    H100_64,
    levels=(H100_64.levels[0], replace(H100_64.levels[1], bandwidth_bytes_per_s=2e9)),
)


def fullest(arch: Arch, layout: Layout, software: Software) -> Memory:
    run = TrainingRun(arch, H100_64, layout, software, "bf16")
    return max(memory_of(run), key=lambda memory: memory.total)


def price(arch: Arch, cluster: Cluster, layout: Layout) -> tuple[float, int]:
    run = run_on(arch, cluster, layout)
    return step_s(run), peak_bytes(run)


def roomy(cluster: Cluster) -> Cluster:
    """Everything fits, so that no advice is looked for."""
    (group,) = cluster.groups
    return replace(
        cluster, groups=(replace(group, device=replace(group.device, memory_bytes=1 << 60)),)
    )


@pytest.mark.parametrize(
    ("arch", "billions"),
    [(LLAMA, 70.55), (LLAMA_405B, 405.9), (GPT3, 174.6), (MIXTRAL, 46.7)],
    ids=lambda a: str(a)[:20],
)
def test_parameters_of_known_models(arch: Arch, billions: float) -> None:
    assert arch.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_flops_follow_the_megatron_formula() -> None:
    # 72 B s l h^2 (1 + s / 6h + V / 12 l h) a sequence; Narayanan et al. 2021, equation 3 over 4/3.
    h, s, v, layers = 12288, 2048, 51200, 96
    formula = 72 * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert GPT3.flops_per_token(causal_counted=False) == pytest.approx(formula, rel=0.001)


def test_eager_moves_more_than_fused_kernels() -> None:
    layout = Layout(64, dp_shard=8, tp=8, zero=1)
    eager, compiled, usual = (
        estimate(LLAMA, H100_64, layout, style=style) for style in ("eager", "compiled", None)
    )
    assert (eager.style, usual.style) == ("eager", "compiled")
    assert 1.005 < eager.step_time_s / compiled.step_time_s < 1.1
    assert eager.memory.total > compiled.memory.total
    assert usual.step_time_s == compiled.step_time_s


def test_a_device_that_names_no_family_is_priced_as_others_of_its_kind() -> None:
    nameless = replace(H100_64.device, family="", power_w=0.0)
    own = replace(H100_64, groups=(DeviceGroup(nameless, 64),))
    layout = Layout(64, tp=8, dp_shard=8)
    known, unknown = estimate(LLAMA, H100_64, layout), estimate(LLAMA, own, layout)
    assert unknown.memory == known.memory
    assert unknown.step_time_s == pytest.approx(known.step_time_s, rel=0.25)


@pytest.mark.parametrize("odd", [100, 60, 127])
def test_fused_attention_fills_odd_heads_up(odd: int) -> None:
    def attention_flops_per_s(head_dim: int) -> float:
        return float(rates_of(H100_64.device, "bf16", Software(), head_dim).attention_flops_per_s)

    even = (odd + 7) // 8 * 8
    assert attention_flops_per_s(odd) == pytest.approx(odd / even * attention_flops_per_s(even))
    old = Software(attention="unfused")
    halves = [rates_of(H100_64.device, "bf16", old, d).attention_flops_per_s for d in (odd, even)]
    assert halves[0] < 0.5 * halves[1]  # batched products of such heads crawl


def test_wider_precisions_need_more_of_everything() -> None:
    node = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    estimates = [
        estimate(replace(LLAMA, layers=4), node, Layout(8, tp=8), precision=precision)
        for precision in ("fp8", "bf16", "fp32", "fp64")
    ]
    for narrow, wide in pairwise(estimates):
        assert narrow.memory.activations < wide.memory.activations
        assert narrow.step_time_s < wide.step_time_s
    # All but a sum for each row of attention's heads and of two norms, float32 in either.
    half, single = (
        held(replace(LLAMA, layers=4), node, Layout(8, tp=8), Software(), precision).saved
        for precision in ("bf16", "fp32")
    )
    sums = 4 * 4 * LLAMA.seq / 8 * (LLAMA.heads + 2)
    assert single - sums == 2 * (half - sums)
    states = (
        estimates[2].memory.parameters
        + estimates[2].memory.gradients
        + estimates[2].memory.optimizer
    )
    assert states == 16 * estimates[2].memory.parameters / 4  # weight, gradient and two moments


def test_activations_follow_korthikanti() -> None:
    # s b h (34 + 5 a s / h) / t with dropout and sequence parallelism (equation 4).
    gpt = Arch("22B", 48, 6144, 64, 64, 24576, 51200, 2048, gated=False)
    layout = Layout(4, 4, tp=8)
    old = Software(attention="unfused", dropout=True)
    expected = 2048 * 4 * 6144 * (34 + 5 * 64 * 2048 / 6144) / 8
    unit, trainer = figures_of(gpt, layout, old), trainer_of_run(gpt, H100_64, layout, old)
    assert saved_bytes(unit, trainer) == pytest.approx(expected, rel=0.05)


layouts_of_64 = st.builds(
    Layout,
    global_batch=st.sampled_from([256, 512]),
    microbatch=st.sampled_from([1, 2]),
    dp_replicate=st.just(1),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    zero=st.sampled_from([0, 1, 3]),
    recompute=st.sampled_from(RECOMPUTES),
).map(lambda layout: replace(layout, dp_shard=64 // (layout.tp * layout.pp)))


@settings(max_examples=60, deadline=None)
@given(layouts_of_64)
def test_recompute_costs_time_and_saves_memory(layout: Layout) -> None:
    sizes = [
        fullest(LLAMA, replace(layout, recompute=recompute), Software()).total
        for recompute in RECOMPUTES
    ]
    assert sizes[0] >= sizes[1] >= sizes[2]
    times = [
        price(LLAMA, H100_64, replace(layout, recompute=recompute))[0] for recompute in RECOMPUTES
    ]
    assert times[0] <= times[1] <= times[2]


@settings(max_examples=60, deadline=None)
@given(layouts_of_64.filter(lambda x: x.dp_shard > 1))
def test_each_level_of_sharding_trades_time_for_memory(layout: Layout) -> None:
    prices = [price(LLAMA, H100_64, replace(layout, zero=zero)) for zero in (1, 2, 3)]
    for (less_s, more_bytes), (more_s, less_bytes) in pairwise(prices):
        assert less_s <= more_s * 1.01
        assert less_bytes <= more_bytes * 1.01
    if layout.dp_shard > 2 and layout.microbatches > 1:
        assert prices[1][0] > prices[0][0]  # gradients in parts are reduced in every microbatch
        assert prices[1][1] < prices[0][1]


def test_experts_that_several_ranks_hold_are_reduced_under_zero_3() -> None:
    layout = Layout(64, tp=8, ep=2, pp=8, zero=3, etp=1)
    one = trainer_of_run(MIXTRAL, H100_64, layout, Software())
    parts = replace(one, layout=replace(layout, etp=4))
    reduced = [
        sum(spent(trainer, 0, 1 << 30)[phase] for phase in ("reduce", "reduce_last"))
        for trainer in (one, parts)
    ]
    assert reduced[0] > 0  # four of the tp ranks hold the same experts
    assert reduced[1] == 0  # each holds a part of its own


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(64, tp=8, dp_shard=8), 8),
        (Layout(64, tp=8, dp_shard=8, etp=1), 1),
        (Layout(64, tp=8, dp_shard=8, ep=8), 64),
        (Layout(64, tp=8, pp=8, ep=8), 8),
        (Layout(64, tp=8, pp=8, ep=2), 8),
        (Layout(64, dp_shard=64, ep=8), 8),
    ],
    ids=str,
)
def test_experts_are_split_by_tensor_parallelism(layout: Layout, ranks: int) -> None:
    assert not illegal(MIXTRAL, layout, 64)
    assert layout.expert_ranks == ranks
    whole = fullest(MIXTRAL, replace(layout, ep=1, etp=1), Software()).parameters
    routed = MIXTRAL.moe_layer_parameters[1] * MIXTRAL.layers / layout.pp * 2
    split = fullest(MIXTRAL, layout, Software()).parameters
    assert whole - split == pytest.approx(routed * (1 - 1 / ranks), rel=1e-6)


def test_mixtral_on_a_node_holds_each_parameter_once() -> None:
    node = roomy(load_cluster(ROOT / "examples/clusters/h100_8.yaml"))
    for layout in (Layout(64, tp=8), Layout(64, tp=8, ep=8), Layout(64, tp=8, ep=2)):
        memory = estimate(MIXTRAL, node, layout).memory
        states = memory.parameters + memory.gradients + memory.optimizer
        assert states == pytest.approx(MIXTRAL.parameters * 18 / 8, rel=0.02)


def test_splitting_experts_costs_their_gathers_and_no_products() -> None:
    whole = Layout(256, tp=8, dp_shard=8, etp=1)
    trainers = [
        trainer_of_run(MIXTRAL, H100_64, replace(whole, etp=etp), Software()) for etp in (1, 8)
    ]
    unit = figures_of(MIXTRAL, whole, Software())
    one, parts = (routed_of(unit, trainer) for trainer in trainers)
    assert parts.flops == pytest.approx(one.flops, rel=0.01)
    assert one.moved_s == 0 < parts.moved_s
    reduced = [
        spent(trainer, 0, round(routed_of(unit, trainer).parameters))["reduce_last"]
        for trainer in trainers
    ]
    assert reduced[1] < reduced[0]


def test_vectors_behind_experts_pass_over_their_rows_unless_products_add_them() -> None:
    layout = Layout(256, tp=1, dp_shard=64, ep=8)
    bytes_by_routing: dict[Routing, list[float]] = {}
    for routing in ("fused", "kernels"):
        software = Software(routing=routing)
        trainer = trainer_of_run(MIXTRAL, H100_64, layout, software)
        bytes_by_routing[routing] = [
            routed_of(figures_of(arch, layout, software), trainer).route_bytes
            for arch in (MIXTRAL, replace(MIXTRAL, biases=True))
        ]
    plain, biased = bytes_by_routing["kernels"]
    assert biased == pytest.approx(2 * plain)
    assert bytes_by_routing["fused"][0] == bytes_by_routing["fused"][1]


@pytest.mark.parametrize(
    ("arch", "layout", "says"),
    [
        (LLAMA, Layout(64, tp=8, dp_shard=8, etp=2), "etp 2 for a model without experts"),
        (MIXTRAL, Layout(64, tp=4, dp_shard=16, etp=8), "etp 8 does not divide tp 4"),
        (
            MIXTRAL,
            Layout(64, tp=8, pp=8, ep=8, etp=8),
            "etp 8 x ep 8 = 64 does not divide tp 8 x cp 1 x dp 1 = 8",
        ),
        (replace(MIXTRAL, ffn=14340), Layout(64, tp=8, dp_shard=8, etp=8), "ffn 14340"),
    ],
)
def test_experts_that_cannot_be_split_so_are_told(arch: Arch, layout: Layout, says: str) -> None:
    assert says in "; ".join(illegal(arch, layout, 64))


def test_heads_of_a_sequence_are_priced_as_software_that_trades_them() -> None:
    rows = completed(parse_pins(["tp=2,cp=4,zero=1"]), 64, 256)
    heads = completed(parse_pins(["tp=2,cp_head=4,zero=1"]), 64, 256)
    assert (heads.cp, heads.cp_head, heads.cp_ring) == (4, 4, 1)
    assert completed(parse_pins([str(heads)]), 64) == heads
    traded = Software(context="heads")
    one, other = estimate(LLAMA, H100_64, heads), estimate(LLAMA, H100_64, rows, traded)
    assert one.step_time_s == other.step_time_s
    assert one.memory == other.memory
    assert one.step_time_s != estimate(LLAMA, H100_64, rows).step_time_s
    ring = completed(parse_pins(["tp=2,cp_ring=4,zero=1"]), 64, 256)
    assert ring == rows


@pytest.mark.parametrize(
    ("fix", "says"),
    [
        ("tp=2,cp=4,cp_head=2", "cp_ring 2 x cp_head 2.*take cp_head=4 or cp_ring=4"),
        ("tp=8,cp_head=3", "does not divide"),
        ("tp=4,cp_head=16", "tp 4 x cp_head 16 does not divide heads 24"),
        ("tp=2,cp=4,cp_head=3", "does not divide it"),
        ("tp=2,tp2=2", "split tensors over tp alone"),
        ("cp_ring=4,cp_outer=2", "pass around one ring"),
    ],
)
def test_what_ranks_of_a_sequence_cannot_do_says_what_they_can(fix: str, says: str) -> None:
    arch = replace(LLAMA, heads=24, kv_heads=8) if "16" in fix else LLAMA
    with pytest.raises(LayoutError, match=says):
        estimate(arch, H100_64, completed(parse_pins([fix]), 64, 256))


def test_etp_is_named_and_read_back() -> None:
    layout = completed(parse_pins(["tp=8,ep=2,etp=2,zero=1"]), 64, 256)
    assert layout.expert_ranks == 4
    assert completed(parse_pins([str(layout)]), 64) == layout
    assert "etp" not in str(replace(layout, etp=0))


def test_the_cheapest_change_may_be_expert_parallelism() -> None:
    priced = estimate(MIXTRAL, H100_64, Layout(256, dp_shard=64, recompute=Recompute(FULL)))
    assert re.match(r"zero=3 fits, .*; ep=8 fits, ", priced.advice), priced.advice
    named = re.search(r"fits, at (\S+) s a step: --fix (\S+)$", priced.advice)
    assert named is not None
    other = estimate(MIXTRAL, H100_64, completed(parse_pins([named[2]]), 64))
    assert other.fits
    assert f"{other.step_time_s:.3g}" == named[1]
    pinned = estimate(MIXTRAL, H100_64, Layout(256, tp=8, dp_shard=8, etp=1))
    assert ",etp=1," in pinned.advice


def test_two_changes_of_the_same_degrees_go_before_other_degrees() -> None:
    layout = Layout(256, 4, dp_shard=16, tp=4, zero=1)
    priced = estimate(LLAMA, H100_64, layout)
    assert not priced.fits
    alone: list[dict[str, Any]] = [
        {"recompute": Recompute(FULL)},
        {"recompute": Recompute(ATTENTION)},
        {"microbatch": 1},
        {"zero": 3},
    ]
    assert not any(estimate(LLAMA, H100_64, replace(layout, **one)).fits for one in alone)
    named = re.match(r"(\S+) fits, at (\S+) s a step: --fix ([^\s;]+)", priced.advice)
    assert named is not None, priced.advice
    assert named[1] == "zero=3,microbatch=1"
    other = estimate(LLAMA, H100_64, completed(parse_pins([named[3]]), 64))
    assert other.fits
    assert f"{other.step_time_s:.3g}" == named[2]
    assert (other.layout.tp, other.layout.dp_shard) == (4, 16)


layouts_of_experts = st.builds(
    Layout,
    global_batch=st.just(512),
    microbatch=st.sampled_from([1, 4]),
    tp=st.sampled_from([1, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2]),
    zero=st.sampled_from([1, 3]),
    dp_shard=st.just(0),
).map(lambda x: replace(x, dp_shard=64 // (x.tp * x.cp * x.pp)))


@settings(max_examples=60, deadline=None)
@given(layouts_of_experts.filter(lambda x: x.dp_shard > 0), st.sampled_from([H100_64, SLOW_64]))
def test_what_is_run_again_hides_less_than_it_takes(layout: Layout, cluster: Cluster) -> None:
    plain, again = (
        price(MIXTRAL, cluster, replace(layout, recompute=recompute))[0]
        for recompute in RECOMPUTES[::2]
    )
    assert plain < again


@pytest.mark.parametrize("bandwidth_bytes_per_s", [5e10, 1e9, 1e8, 1e7])
def test_sends_between_stages_take_what_the_link_takes(bandwidth_bytes_per_s: float) -> None:
    node, fast = H100_64.levels
    thin = replace(fast, span=16, ports=1, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    hosts = replace(H100_64, levels=(node, thin))
    hosts = replace(hosts, groups=(DeviceGroup(H100_64.device, 16),))
    layout = Layout(64, tp=8, pp=2)
    priced = estimate(LLAMA, hosts, layout)
    sent_bytes = layout.microbatches * 2.0 * LLAMA.seq * LLAMA.hidden  # one way, all tp ranks
    assert priced.step_time_s > sent_bytes / bandwidth_bytes_per_s
    assert priced.parts_s["bubble"] > 0


@settings(max_examples=60, deadline=None)
@given(layouts_of_64)
def test_sharding_more_state_never_needs_more_memory(layout: Layout) -> None:
    software = Software()
    each = [fullest(LLAMA, replace(layout, zero=z), software) for z in (0, 1, 2, 3)]
    peaks = [one.parameters + one.gradients + one.optimizer for one in each]
    assert peaks == sorted(peaks, reverse=True)


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))
def test_overlap_has_a_capacity(comm: float, capacity: float, contention: float) -> None:
    exposed = float(exposed_s(comm, capacity, contention))
    assert max(0.0, comm - capacity) <= exposed + 1e-12 <= comm + 1e-9


def test_fix_reads_back() -> None:
    pins = parse_pins(["tp=8,pp=4,dp_shard=2,microbatch=1,recompute=full"])
    layout = completed(pins, 64, 128)
    assert (layout.tp, layout.pp, layout.dp_shard, layout.recompute) == (8, 4, 2, Recompute(FULL))
    again = completed(parse_pins([str(layout)]), 64)
    assert again == layout
    assert parse_pins(["tp=2,offload=none"]) == Pins(tp=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=3", r"= 3 does not divide 64 devices"),
        ("speed=9", "'speed' cannot be fixed. Choose among dp_replicate"),
        ("recomputed=full", "Did you mean recompute"),
        ("tp=²", "give a whole number from 1"),
        ("tp=" + "9" * 5000, "give a whole number from 1"),
        ("tp=two", "a whole number from 1"),
        ("tp=2,tp=4", "twice"),
        ("recompute=some", "none, selective or full"),
        ("zero=7", "0, 1, 2 or 3"),
        ("offload=optimizer", "keep the optimizer's state on devices so far; `autopar plan`"),
        ("offload=often", "choose none or optimizer"),
        ("microbatches=7", "is not dp 64 x microbatches 7"),
    ],
)
def test_bad_fixes_show_their_numbers(text: str, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        completed(parse_pins([text]), 64, 256)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(64, dp_shard=8), "= 8, but the cluster has 64 devices"),
        (Layout(64, tp=64), "tp 64 does not divide ffn|neither divides|^$"),
        (
            Layout(64, dp_shard=8, pp=8, interleave=3, schedule="interleaved-1f1b"),
            "24 stages do not divide",
        ),
        (Layout(63, dp_shard=64), "divide the global batch 63; give --global-batch 64, or"),
        (Layout(100, dp_shard=64), "give --global-batch 64 or 128, or fewer data ranks"),
        (Layout(64, dp_shard=64, ep=4), "without experts"),
        (Layout(64, dp_shard=32, pp=2, interleave=2), "schedule=1f1b has 1 stage a rank, not 2"),
        (
            Layout(24, dp_shard=16, pp=4, interleave=2, schedule="interleaved-1f1b"),
            "global batch 24",
        ),
    ],
)
def test_illegal_layouts_are_explained(layout: Layout, says: str) -> None:

    assert re.search(says, "; ".join(illegal(LLAMA, layout, 64)))


def test_estimate_says_what_would_fit() -> None:
    priced = estimate(LLAMA, H100_64, Layout(256, dp_shard=64, zero=1))
    assert not priced.fits
    named = re.search(r"fits, at (\S+) s a step: --fix (\S+)$", priced.advice)
    assert named is not None, priced.advice
    other = estimate(LLAMA, H100_64, completed(parse_pins([named[2]]), 64))
    assert other.fits
    assert f"{other.step_time_s:.3g}" == named[1]
    text = render(priced)
    assert "GiB short on H100" in text
    assert '"fits": false' in to_json(priced)


def test_what_would_fit_keeps_what_was_turned_off() -> None:
    priced = estimate(LLAMA, H100_64, Layout(256, tp=8, dp_shard=8, sequence_parallel=False))
    named = re.search(r"fits, at (\S+) s a step: --fix (\S+)$", priced.advice)
    assert named is not None, priced.advice
    layout = completed(parse_pins([named[2]]), 64)
    assert not layout.sequence_parallel
    assert f"{estimate(LLAMA, H100_64, layout).step_time_s:.3g}" == named[1]


def test_microbatches_alone_make_the_batch() -> None:
    priced = estimate_files(
        ROOT / "examples/archs/llama3_70b.yaml",
        ROOT / "examples/clusters/h100_8x8.yaml",
        "tp=8,pp=2,microbatch=2,microbatches=7,recompute=full",
    )
    assert (priced.layout.global_batch, priced.layout.microbatches) == (4 * 2 * 7, 7)


def test_where_no_near_layout_fits_one_from_anywhere_is_named() -> None:
    deepseek = load_arch(ROOT / "examples/archs/deepseek_v3.yaml")
    many = load_cluster(ROOT / "examples/clusters/h100_32x8.yaml")
    far = estimate(deepseek, many, Layout(4096, microbatch=4, dp_shard=256, zero=0))
    assert not far.fits
    named = re.search(r"no change of one or two choices fits; --fix (\S+) does, at", far.advice)
    assert named is not None, far.advice
    layout = completed(parse_pins([named[1]]), many.device_count, 4096)
    assert estimate(deepseek, many, layout).fits
    node = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    none = estimate(deepseek, node, Layout(32, dp_shard=8, zero=3))
    assert "no layout of 8 devices fits" in none.advice


def test_between_layouts_of_one_time_the_least_split_is_best() -> None:
    rows = [(1.0, 5.0, Layout(8, tp=8)), (1.0, 9.0, Layout(8)), (0.5, 9.0, Layout(8, tp=2))]
    assert [x.tp for _, _, x in sorted(rows, key=_least_split)] == [2, 1, 8]


def test_llama_70b_on_64_h100() -> None:
    priced = estimate_files(
        ROOT / "examples/archs/llama3_70b.yaml",
        ROOT / "examples/clusters/h100_8x8.yaml",
        "tp=8,pp=2,microbatch=1,recompute=selective,global_batch=256",
    )
    assert priced.fits
    assert 0.3 < priced.mfu < 0.55
    assert sum(priced.parts_s.values()) == pytest.approx(priced.step_time_s)
    assert min(priced.parts_s.values()) >= 0


def test_well_known_runs_lie_in_their_bands() -> None:
    a100 = load_cluster(ROOT / "examples/clusters/a100_128x8.yaml")
    layout = Layout(1536, tp=8, pp=16, dp_shard=8, recompute=Recompute(FULL))
    low, high = estimate(GPT3, a100, layout).time_band_s
    assert low < 32 < high  # "around 32 seconds", Megatron-LM README, GPT-3 example


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_that_no_rank_shares_is_told(zero: int) -> None:
    says = f"zero={zero} splits state over dp_shard, .* leaves dp_shard=1 .* dp_shard=64 in its"
    with pytest.raises(LayoutError, match=says):
        completed(parse_pins([f"dp_replicate=64,zero={zero}"]), 64, 256)
    sharded = completed(parse_pins([f"dp_replicate=8,zero={zero}"]), 64, 256)
    assert (sharded.dp_shard, sharded.zero) == (8, zero)
    ring = completed(parse_pins([f"dp_replicate=8,cp=8,zero={zero}"]), 64, 256)
    assert ring.zero == zero  # context ranks share the state


def test_replicas_alone_split_nothing() -> None:
    layout = completed(parse_pins(["dp_replicate=64"]), 64, 256)
    assert layout.zero == 0
    assert completed(parse_pins([str(layout)]), 64) == layout


def test_stages_may_differ_by_a_layer_where_that_is_said() -> None:
    text = "tp=8,pp=4,microbatch=1,recompute=full,zero=1"
    with pytest.raises(LayoutError, match=r"4 stages do not divide 126 layers \(add uneven=on for "
                       r"stages of 31 and 32\)"):  # fmt: skip
        estimate(LLAMA_405B, H100_64, completed(parse_pins([text]), 64, 256))
    layout = completed(parse_pins([text + ",uneven=on"]), 64, 256)
    assert completed(parse_pins([str(layout)]), 64) == layout
    roomy_64 = roomy(H100_64)
    priced, more = (estimate(replace(LLAMA_405B, layers=n), roomy_64, layout) for n in (126, 128))
    assert priced.step_time_s < more.step_time_s < 1.03 * priced.step_time_s
    assert priced.memory.total <= more.memory.total
    advice = estimate(replace(LLAMA, layers=82), H100_64, Layout(256, 4, tp=4, dp_shard=4, pp=4,
                      uneven=True)).advice  # fmt: skip
    named = re.search(r"fits, at \S+ s a step: --fix (\S+)$", advice)
    assert named is not None, advice
    assert completed(parse_pins([named[1]]), 64).uneven


def test_llama_3_405b_as_it_was_trained() -> None:
    many = replace(H100_64, groups=(DeviceGroup(H100_64.device, 8192),))
    many = replace(many, levels=(H100_64.levels[0], replace(H100_64.levels[1], span=8192)))
    text = "tp=8,pp=16,interleave=8,uneven=on,zero=1"
    priced = estimate(LLAMA_405B, many, completed(parse_pins([text]), 8192, 2048))
    low, high = (priced.mfu * priced.step_time_s / end for end in reversed(priced.time_band_s))
    assert low < 0.43 < high  # Grattafiori et al. 2024, table 4


@pytest.mark.parametrize("uneven", [False, True])
def test_a_stage_without_a_layer_is_refused(uneven: bool) -> None:
    layout = Layout(64, pp=64, interleave=2, schedule="interleaved-1f1b", uneven=uneven)
    broken = "; ".join(illegal(replace(LLAMA, layers=100), layout, 64))
    assert "64 x interleave 2 = 128 stages" in broken
    assert "add uneven=on" not in broken


@settings(max_examples=40, deadline=None)
@given(layouts_of_64, st.integers(4, 100))
def test_uneven_stages_lie_between_even_ones(layout: Layout, layers: int) -> None:
    pp = layout.pp
    below, above = layers // pp * pp, -(-layers // pp) * pp
    x = replace(layout, uneven=True)
    low, mid, high = (price(replace(GPT3, layers=n), H100_64, x) for n in (below, layers, above))
    assert low[0] <= mid[0] * 1.001 <= high[0] * 1.002
    assert low[1] <= mid[1] * 1.001 <= high[1] * 1.002


def test_what_is_allocated_reserved_and_outside_is_told_apart() -> None:
    priced = estimate(
        LLAMA, H100_64, Layout(64, tp=8, dp_shard=8, recompute=Recompute(FULL), zero=3)
    )
    memory = priced.memory
    assert 0 < memory.allocated < memory.allocated + memory.reserved < memory.total
    layout, software = priced.layout, Software(states="fsdp")
    tensors = fullest(LLAMA, layout, replace(software, memory="allocated"))
    assert tensors.total == memory.allocated
    taken = fullest(LLAMA, layout, replace(software, memory="reserved"))
    assert taken.total == memory.allocated + memory.reserved
    text = render(priced)
    assert f"{size(memory.allocated)} allocated, {size(taken.total)} reserved" in text
    parts = memory.parts()
    assert "most for " + max(parts, key=lambda name: parts[name]) in text


def test_what_a_sweep_leaves_out_is_not_faster() -> None:
    node = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    arch = replace(LLAMA, layers=20, seq=2048)
    every = [*layouts(arch, node, 8)]
    fitting = [x for x in every if peak_bytes(run_on(arch, node, x)) <= node.memory_bytes]
    best = min(step_s(run_on(arch, node, x)) for x in fitting)
    assert 0 < len(fitting) < len(every)
    assert sweep(arch, node, 8, keep=1)[0][0] == best


def test_sweep_finds_what_fits() -> None:
    node = load_cluster(ROOT / "examples/clusters/h100_8.yaml")
    best = sweep(replace(MIXTRAL, layers=8), node, 64, keep=3)
    assert len(best) == 3
    assert best[0][0] <= best[1][0] <= best[2][0]
    assert all(peak <= H100_64.memory_bytes for _, peak, _ in best)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("layers: 80", "layer: 80", "layers: missing; layer: unknown key, did you mean 'layers'"),
        ("hidden: 8192", "", "hidden: missing"),
        ("hidden: 8192", "? [a, b]\n: 1", "not YAML at line .* unhashable key"),
        ("hidden: 8192", "hidden: 1e30", "hidden: '1e30' is not a whole number"),
        ("layers: 80", "layers: 8000000", "layers: 8000000 must be at most 100000"),
        ("layers: 80", "layers: [80", "not YAML at line"),
        ("layers: 80", "layers: 80\nlayers: 40", "key 'layers' is given twice"),
        ("layers: 80", "layers: 80\nshared_experts: 2", "without experts"),
        ("layers: 80", "layers: 80\nwindow: 128", "give both or none"),
        ("layers: 80", "layers: 80\nlatent: {kv_rank: 512}", "latent.q_rank: missing"),
        ("heads: 64", "heads: 63", "does not divide"),
        ("kv_heads: 8", "kv_heads: 7", "kv_heads 7 does not divide heads 64"),
        ("gated: true", "experts: 8", "give both"),
        ("gated: true", "dense_ffn: 4096", "dense_ffn 4096 for a model without experts"),
        ("gated: true", "dense_layers: 3", "dense_layers 3 for a model without experts"),
        ("gated: true", "name: " + "[" * 3000 + "]" * 3000, "too deep to be read"),
        ("vocab: 128256", "vocab: -1", "vocab: -1 must be greater than 0"),
    ],
)
def test_bad_architecture_files(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = (ROOT / "examples/archs/llama3_70b.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ArchFileError, match=says):
        load_arch(tmp_path / "a.yaml")


def test_a_binary_architecture_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\x80\xe9\x00")
    with pytest.raises(ArchFileError, match="cannot be read as text"):
        load_arch(tmp_path / "a.yaml")


def test_latent_attention_and_windows_can_be_described(tmp_path: Path) -> None:
    text = (ROOT / "examples/archs/deepseek_v3.yaml").read_text()
    arch = load_arch(ROOT / "examples/archs/deepseek_v3.yaml")
    assert arch.parameters / 1e9 == pytest.approx(671, rel=0.01)
    (tmp_path / "a.yaml").write_text(text + "window: 128\nwindowed_layers: 30\n")
    assert load_arch(tmp_path / "a.yaml").mean_context < arch.mean_context


@pytest.mark.parametrize(("device", "precision"), [("A100", "fp8"), ("H100", "fp4")])
def test_formats_that_a_device_does_not_compute_in_are_refused(device: str, precision: str) -> None:
    own = replace(H100_64, groups=(DeviceGroup(find_device(device), 64),))
    with pytest.raises(UserError, match=f"--precision {precision}: {device}.* computes in bf16"):
        estimate(LLAMA, own, Layout(64, tp=8, dp_shard=8), precision=precision)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="--global-batch 0"):
        estimate_files("a.yaml", "c.yaml", "tp=8", global_batch=0)


def test_another_schedule_is_advised_where_gpipe_does_not_fit() -> None:
    priced = estimate(LLAMA, H100_64, Layout(512, tp=8, pp=4, dp_shard=2, schedule="gpipe"))
    assert priced.advice.startswith("schedule=1f1b fits")
