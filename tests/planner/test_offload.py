"""Optimizer state in host memory: what it costs, and that the search takes it where it helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.catalogue import find_device
from autopar.files.cluster_file import ClusterFileError, cluster_from_text, load_cluster
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import DoesNotFit
from autopar.nouns.layout import LayoutError
from autopar.nouns.mesh import Mesh
from autopar.nouns.offload import CHUNKS
from autopar.nouns.prediction import Memory
from autopar.nouns.recompute import KEEP_ALL
from autopar.planner.advice.remedies import search_or_advise
from autopar.planner.ask.candidates import offloaded
from autopar.planner.ask.question import Question
from autopar.planner.search.layouts import search_plan
from autopar.planner.solve.solved import state_of
from autopar.planner.solve.standings import NothingFits
from autopar.pricing.memory import rank_memory, step_memory
from autopar.pricing.offload import (
    LINK_SHARE,
    chunk_bytes,
    obstacle,
    resident_bytes,
    streamed_s,
)
from autopar.pricing.state import StateSharding
from autopar.pricing.units.held import StageBytes
from tests.planner.graphs import gpt
from tests.planner.one_stage import one_stage
from tests.planner.test_search import LARGE, NODE, memory_limited, question
from tests.planner.test_simulation import NUMEL, summary

H100 = find_device("H100")
WIDE = gpt(layers=8, **{**LARGE, "b": 4})
"""0.47 billion parameters: 3.8 GB of optimizer state."""


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64), st.floats(0.1, 1))
def test_it_never_saves_time_nor_takes_memory(
    zero: int, shard: int, copies: int, link: float
) -> None:
    mesh = Mesh(("dp_replicate", "dp_shard"), (8 // shard, shard))
    model = replace(summary(), copies={"layer": copies})
    plain = StateSharding(zero, mesh, 1, "float32")
    device = replace(H100, host_bandwidth_bytes_per_s=link * H100.host_bandwidth_bytes_per_s)
    cluster = replace(NODE, groups=(replace(NODE.groups[0], device=device),))
    off = replace(plain, offload="optimizer")
    before, after = (step_memory(model, s, KEEP_ALL, device) for s in (plain, off))
    assert after.total <= before.total
    assert after.host == before.optimizer == copies * 8 * NUMEL // (shard if zero else 1)
    assert (before.host, before.host_limit) == (0, 0)
    assert after.optimizer <= 2 * chunk_bytes("adamw")
    times = [one_stage(model, s, cluster, KEEP_ALL) for s in (plain, off)]
    # all of it there and back beside each other, and behind it the last chunk
    moved = after.host + min(after.host, chunk_bytes("adamw"))
    late_s = moved / (LINK_SHARE * device.host_bandwidth_bytes_per_s)
    assert times[1].optimizer_s - times[0].optimizer_s == pytest.approx(late_s)
    assert times[1].total_s - times[0].total_s == pytest.approx(late_s)


def alone(limit_bytes: int, **fix: str) -> Question:
    """One device of so much memory, in one pass: nothing but state can give way."""
    cluster = memory_limited(limit_bytes)
    levels = (replace(NODE.levels[0], span=1),)
    cluster = replace(cluster, groups=(replace(cluster.groups[0], count=1),), levels=levels)
    asked = question(WIDE, 4, cluster, {"recompute": "full", **fix})
    return replace(asked, obstacles=("statistics over the batch",))


def test_what_fits_in_no_other_way_does_with_it() -> None:
    free = search_plan(alone(H100.memory_bytes)).best
    assert free.decided.layout.offload == "none"
    assert free.priced.memory.optimizer > 2**31
    limit = free.priced.memory.total - free.priced.memory.optimizer // 2
    best = search_plan(alone(limit)).best
    assert best.decided.layout == offloaded(free.decided.layout)
    assert best.priced.memory.total <= limit
    late_s = streamed_s(H100, free.priced.memory.optimizer, "adamw")
    assert best.priced.time.total_s == pytest.approx(free.priced.time.total_s + late_s)
    pinned = search_plan(alone(H100.memory_bytes, offload="optimizer")).best
    assert (pinned.priced.time, pinned.decided.layout) == (best.priced.time, best.decided.layout)
    with pytest.raises(DoesNotFit) as error:
        search_or_advise(alone(limit, offload="none"))
    assert "The cheapest change that fits: without --fix offload=none (" in str(error.value)
    assert "offload=optimizer): " in str(error.value)


def test_it_is_taken_instead_of_recomputation_where_that_takes_longer() -> None:
    """Replicas whose activations fit and whose optimizer state does not, with a fast link."""
    fix = {"dp_replicate": "8", "microbatch": "4", "pp": "1", "tp": "1"}
    graph = gpt(layers=4, **LARGE)
    free = search_plan(question(graph, 32, NODE, fix)).best
    assert free.decided.layout.recompute == KEEP_ALL
    limit = free.priced.memory.total - free.priced.memory.optimizer * 4 // 5
    device = replace(memory_limited(limit).device, host_bandwidth_bytes_per_s=100e9 / LINK_SHARE)
    cluster = replace(NODE, groups=(replace(NODE.groups[0], device=device),))
    best = search_plan(question(graph, 32, cluster, fix)).best
    kept = search_plan(question(graph, 32, cluster, {**fix, "offload": "none"})).best
    assert (best.decided.layout.offload, best.decided.layout.recompute) == ("optimizer", KEEP_ALL)
    assert kept.decided.layout.recompute != KEEP_ALL
    assert best.priced.time.total_s < kept.priced.time.total_s


def test_a_pipeline_may_take_it() -> None:
    fix = {"pp": "4", "tp": "2", "schedule": "1f1b", "microbatch": "1", "recompute": "full"}
    with pytest.raises(NothingFits) as error:
        search_plan(question(WIDE, 4, memory_limited(2**31), {**fix, "offload": "none"}))
    tightest = error.value.tightest
    assert tightest is not None
    best = search_plan(
        question(WIDE, 4, memory_limited(tightest.priced.memory.total - 1), fix)
    ).best
    assert {stage.offload for stage in best.decided.stages} == {"optimizer"}
    assert best.priced.memory.total < tightest.priced.memory.total
    assert 0 < best.priced.memory.host <= best.priced.memory.host_limit


def test_the_memory_of_the_host_has_its_limit() -> None:
    free = search_plan(alone(H100.memory_bytes)).best
    asked = alone(free.priced.memory.total - free.priced.memory.optimizer // 2)
    (group,) = asked.cluster.groups
    poor = replace(group, device=replace(group.device, host_memory_bytes=2**31))
    with pytest.raises(NothingFits, match="GiB more than may be pinned for a device"):
        search_plan(replace(asked, cluster=replace(asked.cluster, groups=(poor,))))
    half = Memory(50, 10, 10, 10, 10, 10, limit=100, host=90, host_limit=100)
    assert (half.fits, half.filled) == (True, 0.9)
    assert not replace(half, host=101).fits


def test_stages_of_a_rank_share_the_chunks_of_a_step() -> None:
    chunk = chunk_bytes("adamw")

    def stage(kept: int) -> StageBytes:
        resident = resident_bytes(kept, "adamw")
        return StageBytes(0, 0, resident, kept, 0, 0, 0, 0, 0, frozenset(), CHUNKS * chunk)

    for each, count in ((chunk // 2, 3), (chunk, 4), (9 * chunk, 8)):
        memory = rank_memory([stage(each)] * count, 0, H100)
        assert memory.optimizer == resident_bytes(each * count, "adamw")
        assert memory.host == each * count


CPUS = load_cluster("examples/clusters/cpu_4.yaml")


@pytest.mark.parametrize(
    ("cluster", "optimizer", "framework", "why"),
    [
        (CPUS, "adamw", "torch", "part of its host"),
        (NODE, "sgd", "torch", "keeps no state"),
        (NODE, "own:2", "torch", "AdamW's state alone"),
        (NODE, "adamw", "jax", "JAX programs keep"),
        (load_cluster("examples/clusters/tpu_v5p_64.yaml"), "adamw", "torch", "nothing is known"),
    ],
)
def test_where_nothing_can_be_offloaded_it_is_not_tried(
    cluster: Cluster, optimizer: str, framework: str, why: str
) -> None:
    assert why in obstacle(cluster, optimizer, framework)
    assert not obstacle(NODE, "adamw", "torch")
    asked = question(gpt(layers=2), 8)
    asked = replace(asked, cluster=cluster, optimizer=optimizer, framework=framework)
    assert not asked.offloads


def test_pins_and_states_carry_it() -> None:
    with pytest.raises(LayoutError, match="choose none or optimizer"):
        question(gpt(layers=2), 8, NODE, {"offload": "activations"})
    asked = alone(H100.memory_bytes, offload="optimizer")
    best = search_plan(asked).best
    assert state_of(asked, best.decided.layout, best.decided.candidate).offloads


TEXT = """
name: one
groups:
  - {device: %s, count: 1%s}
levels:
  - {name: wire, span: 1, bandwidth: 1 GB/s, latency: 5 us}
"""


def test_a_group_says_how_its_devices_reach_their_host() -> None:
    own = cluster_from_text(TEXT % ("H100", ", host: {bandwidth: 20 GB/s, memory: 64 GB}")).device
    assert (own.host_bandwidth_bytes_per_s, own.host_memory_bytes) == (20e9, 64e9)
    assert replace(own, host_bandwidth_bytes_per_s=64e9, host_memory_bytes=256 * 10**9) == H100
    with pytest.raises(ClusterFileError, match=r"groups\[0\]\.host: cpu-core is a core"):
        cluster_from_text(TEXT % ("cpu-core", ", host: {bandwidth: 20 GB/s, memory: 64 GB}"))
    with pytest.raises(ClusterFileError, match=r"groups\[0\]\.host\.bandwidth: .* out of any"):
        cluster_from_text(TEXT % ("H100", ", host: {bandwidth: 20 B/s, memory: 64 GB}"))
    text = cluster_from_text(TEXT % ("cpu-core", "")).to_json()
    assert "host" not in text
    assert Cluster.from_json(text).to_json() == text
    assert Cluster.from_json(NODE.to_json()) == NODE
