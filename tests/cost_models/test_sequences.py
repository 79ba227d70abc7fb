"""Ranks that share a sequence under published software: what hides, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.rates import attention_share, fitted, product_share
from autopar.cost_models.software import Software
from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch
from autopar.frontends.family.model import NoGraph
from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import Layout
from autopar.planner.family.runs import TrainingRun, peak_bytes, price, step_s
from tests.cost_models.trained import figures_of

LLAMA = Arch("l", 4, 4096, 32, 8, 14336, vocab=32000, seq=32768)
NODE = load_cluster("examples/clusters/h100_8.yaml")
RINGED = Layout(8, dp_shard=1, cp=8)


def slowed(cluster: Cluster, times: float) -> Cluster:
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / times)
        for level in cluster.levels
    )
    return replace(cluster, levels=levels)


def context_s(cluster: Cluster, software: Software) -> float:
    run = TrainingRun(LLAMA, cluster, RINGED, software, "bf16")
    return float(price(run).parts_s.get("context", 0.0))


def test_a_ring_hides_behind_its_blocks_and_all_else_is_waited_for() -> None:
    ring, gather, heads = (Software(context=c) for c in ("ring", "gather", "heads"))
    # Copies and sums around its blocks are there whatever the links are.
    around = context_s(NODE, ring)
    assert 0 < around == pytest.approx(context_s(slowed(NODE, 0.5), ring))
    assert context_s(NODE, gather) > 0
    assert context_s(NODE, heads) > 0
    slow = slowed(NODE, 1000)
    # What no block hides grows by all of what a slower link adds.
    shown = context_s(slow, ring) - around
    assert shown > 0
    assert context_s(slowed(NODE, 2000), ring) - around > 2.01 * shown


def test_blocks_of_a_ring_have_a_rank_s_rows_each_and_overlap() -> None:
    """A rank that has whole rows has fewer heads."""
    rows = [
        unit.attention.rows
        for context in ("ring", "gather", "heads")
        if (unit := figures_of(LLAMA, RINGED, Software(context=context))).attention
    ]
    every = RINGED.microbatch * LLAMA.seq * LLAMA.heads
    assert rows == [every, every / 8, every / 8]


@pytest.mark.parametrize("context", ["ring", "gather", "heads"])
def test_more_ranks_of_a_sequence_are_faster_and_hold_less(context: str) -> None:
    software = Software(context=context)  # type: ignore[arg-type]
    runs = [
        TrainingRun(LLAMA, NODE, Layout(8, tp=tp, cp=8 // tp), software, "bf16") for tp in (8, 1)
    ]
    alone = TrainingRun(LLAMA, NODE, Layout(8, dp_shard=8), software, "bf16")
    assert peak_bytes(runs[1]) < peak_bytes(alone)
    assert all(step_s(run) < 2 * step_s(alone) for run in runs)


def test_dropout_in_attention_passes_round_no_ring() -> None:
    dropped = Software(attention="unfused", dropout=True)
    with pytest.raises(NoGraph, match=r"does not pass round a ring of cp 8 ranks; declare context"):
        step_s(TrainingRun(LLAMA, NODE, RINGED, dropped, "bf16"))
    assert step_s(TrainingRun(LLAMA, NODE, RINGED, replace(dropped, context="gather"), "bf16")) > 0


def test_attention_slows_with_the_board_s_power_as_products_do() -> None:
    full, half = find_device("H100"), find_device("H100-96GB")
    shares = [product_share(d, fitted()) for d in (full, half)]
    attention = [attention_share(d, "flash", 128, fitted()) for d in (full, half)]
    assert attention[1] / attention[0] == pytest.approx(shares[1] / shares[0])
    assert attention[1] < attention[0]


def test_newer_attention_on_blackwell_is_faster_by_one_constant() -> None:
    shares = {
        kernel: attention_share(find_device("B200"), kernel, 64, fitted())
        for kernel in ("flash_new", "flash_4")
    }
    assert shares["flash_4"] == pytest.approx(fitted()["flash_4"] * shares["flash_new"])
    assert shares["flash_4"] > shares["flash_new"]
