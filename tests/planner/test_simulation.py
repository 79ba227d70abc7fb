"""A step's phases: hiding communication has its price, and what a profile measured is used."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.nouns.buckets import BUCKET_BYTES
from autopar.nouns.cluster import Cluster, MeasuredRate
from autopar.nouns.level import MeasuredCollective
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import KEEP_ALL, POLICIES, Recompute
from autopar.pricing.memory import step_memory
from autopar.pricing.stage_time import StageTime, stage_time
from autopar.pricing.state import StateSharding
from autopar.pricing.step_time import sums_s
from autopar.pricing.summary import Summary
from autopar.pricing.units.moves import bucket_time_s, move_time_s
from autopar.pricing.units.unit import Kind, Unit
from autopar.pricing.units.walk import Life
from tests.planner.one_stage import one_stage

PLAIN = load_cluster("examples/clusters/cpu_4.yaml")
NUMEL = 8_000_000
"""Of a unit: more than a bucket of DDP's."""
UPDATE_S_PER_BYTE = 1e-10


def cluster(contention: float = 0.0, **lines: float) -> Cluster:
    """Four processes; ``lines`` are seconds per byte of measured collectives over all of them."""
    sizes = (1.0, 1e9)
    measured = tuple(
        MeasuredCollective(kind, 4, tuple((size, size * slope) for size in sizes))
        for kind, slope in lines.items()
    )
    level = replace(PLAIN.levels[0], contention=contention, measured=measured)
    rate = MeasuredRate("update", "fp32", 0.0, 0.0, UPDATE_S_PER_BYTE, 0.0, 0.0, "adamw", "forward")
    device = replace(PLAIN.device, rates=(rate,), process_bytes=10**8, heap_share=0.5)
    groups = (replace(PLAIN.groups[0], device=device),)
    return replace(PLAIN, groups=groups, levels=(level,))


def summary(forward_s: float = 0.1) -> Summary:
    trained = {Kind("float32"): NUMEL}
    unit = Unit(forward_s, 2 * forward_s, 0.0, 0.0, 0.0, (0, 0), trained, {}, {}, {})
    root = Unit(0.0, 0.0, 0.0, 0.0, 0.0, (0, 0), {}, {}, {}, {})
    lives = dict.fromkeys(POLICIES, Life(0, 10**6, ""))
    return Summary(root, {"layer": unit}, ("layer",) * 4, {"layer": 4}, lives, 0)


def state(zero: int, clips: bool = False) -> StateSharding:
    axis = "dp_shard" if zero else "dp_replicate"
    return StateSharding(zero, Mesh((axis,), (4,)), 1, "float32", clips=clips)


def test_a_hidden_second_costs_what_was_measured() -> None:
    free, dear = (
        one_stage(summary(), state(0), cluster(c, bucket_reduce=1e-9), KEEP_ALL) for c in (0.0, 0.5)
    )
    moved = 4 * 4 * NUMEL * 1e-9
    assert free.data_communication_s == pytest.approx(moved)
    hidden = moved * 3 / 4  # the last unit's reduction has nothing left to hide behind
    hidden += sums_s(summary(), state(0), cluster()).loss_s
    assert dear.total_s - free.total_s == pytest.approx(0.5 * hidden)
    assert free.forward_s == dear.forward_s == pytest.approx(0.4)


def test_buckets_are_as_small_as_pays() -> None:
    """Over a slow link without latency the smallest show least; where each costs as much as a unit
    takes, the usual ones stay; they are never slower than these."""
    small = summary()
    unit = replace(small.bodies["layer"], trained={Kind("float32"): NUMEL // 8})
    small = replace(small, bodies={"layer": unit})

    def time(latency_s: float, bucket_bytes: int) -> StageTime:
        points = ((1.0, latency_s), (1e9, latency_s + 5.0))
        where = cluster()
        curve = MeasuredCollective("bucket_reduce", 4, points)
        where = replace(where, levels=(replace(where.levels[0], measured=(curve,)),))
        asked = replace(state(0), bucket_bytes=bucket_bytes)
        return stage_time(small, asked, where, KEEP_ALL, beside=True)

    usual = time(0.0, BUCKET_BYTES)
    free = time(0.0, 0)
    assert free.way.bucket_bytes < BUCKET_BYTES
    assert free.reduce_s < usual.reduce_s
    assert free.reduce_s == time(0.0, free.way.bucket_bytes).reduce_s
    assert time(0.3, 0).way.bucket_bytes >= BUCKET_BYTES
    assert time(0.3, 0).reduce_s <= time(0.3, BUCKET_BYTES).reduce_s


def test_small_gradients_wait_for_a_full_bucket() -> None:
    """The last unit fills the first bucket; the others' go when the last backward is over."""
    small = summary()
    unit = replace(small.bodies["layer"], trained={Kind("float32"): NUMEL // 8})
    small = replace(small, bodies={"layer": unit})
    time = one_stage(small, state(0), cluster(bucket_reduce=1e-9), KEEP_ALL)
    one = 4 * NUMEL // 8 * 1e-9
    assert time.data_communication_s == pytest.approx(4 * one)
    assert time.exposed_s == pytest.approx(3 * one)


def test_a_bucket_starts_once_whatever_it_is_measured_with() -> None:
    """Without a profile each bucket is a collective; a profile has the sum of all of them."""
    mesh = Mesh(("dp_replicate",), (4,))
    whole = move_time_s(PLAIN, mesh, "all_reduce", "dp_replicate", BUCKET_BYTES)
    seconds = bucket_time_s(PLAIN, mesh, "dp_replicate", 0.0, 3 * BUCKET_BYTES)
    assert seconds == pytest.approx(3 * whole)
    where = cluster()
    points = ((1e6, 5e-3), (1e8, 50e-3))
    curve = MeasuredCollective("bucket_reduce", 4, points)
    where = replace(where, levels=(replace(where.levels[0], measured=(curve,)),))
    parts = [bucket_time_s(where, mesh, "dp_replicate", i * 2.5e7, 2.5e7) for i in range(4)]
    assert sum(parts) == pytest.approx(50e-3)


def test_phases_add_up_and_gathers_belong_to_the_forward() -> None:
    where = cluster(0.2, unit_gather=1e-9, unit_reduce=3e-9)
    time = one_stage(summary(), state(1), where, KEEP_ALL)
    size = 4 * 4 * NUMEL
    assert time.forward_s == pytest.approx(0.4 + size * 1e-9)
    updated = 7 * size / 4 * UPDATE_S_PER_BYTE
    assert time.optimizer_s == pytest.approx(updated)
    loss_s = 0.2 * sums_s(summary(), state(1), where).loss_s
    assert time.total_s == pytest.approx(1.2 + size * 4e-9 + updated + loss_s)


def test_backward_hides_the_sum_of_the_loss_and_nothing_that_of_the_norm() -> None:
    """4 ms for a number over four ranks; the loss beside 0.8 s of backward, or beside none."""
    number = MeasuredCollective("all_reduce", 4, ((1.0, 4e-3), (1e3, 4e-3)))

    def total_s(clips: bool, contention: float, spent: Summary) -> float:
        lines = cluster(contention, unit_gather=1e-12, unit_reduce=1e-12)
        level = replace(lines.levels[0], measured=(*lines.levels[0].measured, number))
        return one_stage(spent, state(1, clips), replace(lines, levels=(level,)), KEEP_ALL).total_s

    plain = total_s(False, 0.0, summary())
    assert total_s(True, 0.0, summary()) - plain == pytest.approx(4e-3)
    assert total_s(False, 0.5, summary()) - plain == pytest.approx(2e-3, rel=1e-2)
    assert total_s(False, 0.0, summary(0.0)) > 4e-3


def test_without_a_measured_unit_the_plain_collective_is_priced() -> None:
    time = one_stage(summary(), state(0), cluster(all_reduce=2e-9), KEEP_ALL)
    assert time.data_communication_s == pytest.approx(4 * 4 * NUMEL * 2e-9)


def test_counts_of_the_batch_come_before_the_forward() -> None:
    lines = cluster(bucket_reduce=1e-9)
    level = lines.levels[0]
    tiny = (*level.measured, MeasuredCollective("all_reduce", 4, ((1.0, 2e-3), (1e3, 2e-3))))
    where = replace(lines, levels=(replace(level, measured=tiny),))
    plain, counting = (
        one_stage(s, state(0), where, KEEP_ALL) for s in (summary(), replace(summary(), counts=1))
    )
    assert counting.forward_s - plain.forward_s == pytest.approx(2e-3)
    assert counting.total_s - plain.total_s == pytest.approx(2e-3)


def waiting_s(zero: int, meetings: tuple[int, int] = (0, 0), policy: str = "none") -> float:
    """Of four layers of 0.1 and 0.2 s, of ranks that are 10 ms apart after one second."""
    where = cluster(unit_gather=1e-12, unit_reduce=1e-12, bucket_reduce=1e-12)
    device = replace(where.device, jitter_sqrt_s=0.01)
    shaky = replace(where, groups=(replace(where.groups[0], device=device),))
    spent = summary()
    unit = replace(spent.bodies["layer"], meetings=meetings)
    spent = replace(spent, bodies={"layer": unit})
    with_it, without = (one_stage(spent, state(zero), c, Recompute(policy)) for c in (shaky, where))
    assert without.waiting_s == 0.0
    assert with_it.total_s - without.total_s == pytest.approx(with_it.waiting_s)
    return with_it.waiting_s


def test_ranks_wait_for_the_slowest_wherever_they_meet() -> None:
    # DDP meets once, at the end of backward; FSDP2 at every gather and reduction.
    assert waiting_s(0) == pytest.approx(0.01 * math.sqrt(0.8))
    assert waiting_s(1) == pytest.approx(0.01 * (math.sqrt(4 * 0.4) + math.sqrt(4 * 0.8)))
    assert waiting_s(3) == pytest.approx(0.01 * (math.sqrt(4 * 0.4) + math.sqrt(8 * 0.8)))
    # Of two reshardings in each of four layers, both ways.
    meets = 0.01 * (math.sqrt(8 * 0.4) + math.sqrt((8 + 1) * 0.8))
    assert waiting_s(0, (2, 2)) == pytest.approx(meets)
    again = 0.01 * (math.sqrt(8 * 0.4) + math.sqrt((8 + 1) * 1.2))
    assert waiting_s(0, (2, 2), "compute") == pytest.approx(again)


def test_memory_holds_the_measured_process_and_its_heap() -> None:
    device = cluster().device
    plain = replace(device, process_bytes=0, heap_share=0.0)
    measured, assumed = (step_memory(summary(), state(0), KEEP_ALL, d) for d in (device, plain))
    library = replace(device, package_bytes=(("transformers", 10**7),))
    written = replace(summary(), packages=frozenset({"transformers"}))
    assert step_memory(written, state(0), KEEP_ALL, library).total == measured.total + 10**7
    assert step_memory(summary(), state(0), KEEP_ALL, library).total == measured.total
    lives = 4 * 4 * 4 * NUMEL + 10**6
    assert measured.total == pytest.approx(1.5 * lives + 10**8)
    assert assumed.total == pytest.approx(1.04 * lives + 350_000_000)
    assert measured.limit == device.memory_bytes


def test_a_unit_is_gathered_before_the_last_ones_gradients_are_reduced() -> None:
    """Layers that take longer than their traffic hide all of it but the first gather of each way
    and the last reduction; on gloo, where each waits for the other, nothing is hidden."""
    lines = cluster(unit_gather=1e-9, unit_reduce=2e-9)
    streams = replace(lines, levels=(replace(lines.levels[0], library="nccl"),))
    one = 4 * NUMEL * 1e-9
    spent = summary()
    sharded = replace(state(3), microbatches=2)
    hidden, waited = (one_stage(spent, sharded, c, KEEP_ALL) for c in (streams, lines))
    assert hidden.exposed_s == pytest.approx(2 * (2 * one + 2 * one))
    assert waited.exposed_s == pytest.approx(waited.data_communication_s)
    assert waited.data_communication_s == pytest.approx(2 * 4 * (2 * one + 2 * one))
