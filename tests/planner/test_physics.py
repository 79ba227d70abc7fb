"""No figure that physics forbids is said, and one that would be is told by its name."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.calibrate import calibrate
from autopar.cost_models.catalogue import catalogue
from autopar.cost_models.collectives import AxisGroup
from autopar.cost_models.compute import op_rate
from autopar.cost_models.physics import Bound, Impossible, check
from autopar.cost_models.precision import compute_dtype
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb
from autopar.files.cluster_file import cluster_from_text
from autopar.frontends.dispatch import capture
from autopar.frontends.family.arch_file import load_arch
from autopar.frontends.shared.captured import Captured
from autopar.nouns.cluster import Cluster, MeasuredRate
from autopar.nouns.errors import UserError
from autopar.planner.family.estimate import PRECISIONS, estimate
from autopar.planner.family.pins import completed, read_pins
from autopar.planner.planning import PlanResult, plan_captured
from autopar.planner.solve import alarms
from autopar.pricing import priced as full_price
from autopar.pricing.utilization import cluster_peak_s
from autopar.rules.work import PRODUCTS, op_work
from tests.cost_models.collective import collective_time_s
from tests.planner.dtype_mixes import MIXES, B, S

DEVICES = sorted(catalogue())
LINK_BYTES_PER_S = 50e9
ARCHS = [load_arch(path) for path in sorted(Path("examples/archs").glob("*.yaml"))]
SEEDED: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None}


def node(device: str, count: int = 4) -> Cluster:
    return cluster_from_text(
        f"groups: [{{device: {device}, count: {count}}}]\n"
        f"levels: [{{name: link, span: {count}, bandwidth: 50 GB/s, latency: 3 us}}]"
    )


def measured_as(cluster: Cluster, **changes: Any) -> Cluster:
    device = replace(cluster.device, **changes)
    return replace(cluster, groups=(replace(cluster.groups[0], device=device),))


@cache
def captured_of(number: int) -> Captured:
    return capture(MIXES[number].workload())


def planned(number: int, cluster: Cluster, **fix: str) -> PlanResult:
    workload = MIXES[number].workload()
    return plan_captured(captured_of(number), workload, cluster, "m.py:M", fix)


def check_plan(result: PlanResult, cluster: Cluster) -> None:
    """Of the plan as said, from the lowered ops and the devices' figures alone."""
    plan, device = result.plan, cluster.device
    prediction, memory = plan.prediction, plan.prediction.memory_bytes
    lowered = result.lowered
    flops_s = 0.0
    for op in lowered.ops:
        if op.bound is not None and op.bound.rule.cost in PRODUCTS:
            work = op_work(op.op, op.bound, op.strategy, lowered.mesh, lowered.graph.tensors)
            flops_s += (work.forward_flops + work.backward_flops) / device.peak(work.dtype)
    assert prediction.step_time_s >= flops_s * plan.microbatches * (1 - 1e-9)
    state = memory.parameters + memory.gradients + memory.optimizer
    assert prediction.step_time_s >= memory.optimizer / device.memory_bandwidth_bytes_per_s
    assert 0 < prediction.mfu <= 1
    assert 0 < prediction.lower_bound_s <= prediction.step_time_s * (1 + 1e-9)
    assert prediction.time_band_s[0] <= prediction.step_time_s <= prediction.time_band_s[1]
    assert prediction.memory_band_bytes[0] <= memory.total <= prediction.memory_band_bytes[1]
    assert prediction.tokens_per_s == pytest.approx(B * S / prediction.step_time_s)
    assert 0 < state <= memory.total <= memory.limit
    stored = sum(t.size_bytes for _, t in result.graph.parameters())
    assert memory.parameters >= stored / cluster.device_count
    figures = [
        prediction.compute_time_s,
        prediction.exposed_communication_s,
        prediction.waiting_time_s,
    ]
    figures += [prediction.forward_time_s, prediction.optimizer_time_s]
    assert all(math.isfinite(f) and 0 <= f <= prediction.step_time_s for f in figures)


@given(
    st.integers(0, len(MIXES) - 1),
    st.sampled_from(DEVICES),
    st.sampled_from([{"tp": "1"}, {"tp": "2"}, {"dp_shard": "4", "zero": "3"}, {"tp": "4"}]),
    st.floats(0.01, 10.0),
)
@settings(max_examples=12, **SEEDED)
def test_plans_keep_to_physics(
    number: int, device: str, fix: dict[str, str], factor: float
) -> None:
    cluster = node(device)
    runs = tuple((phase, factor) for phase in ("forward", "backward"))
    for one in (cluster, measured_as(cluster, fitted=runs)):
        check_plan(planned(number, one, **fix), one)


@given(
    st.sampled_from(ARCHS),
    st.sampled_from(DEVICES),
    st.sampled_from(PRECISIONS),
    st.sampled_from([{}, {"tp": "8"}, {"tp": "2", "pp": "2"}]),
    st.sampled_from([8, 64, 512]),
)
@settings(max_examples=80, **SEEDED)
def test_estimates_keep_to_physics(
    arch: Any, device: str, precision: str, fix: dict[str, str], batch: int
) -> None:
    cluster = measured_as(node(device, 8), memory_bytes=1 << 60)  # no advice is looked for
    try:
        priced = estimate(arch, cluster, completed(read_pins(fix), 8, batch), precision=precision)
    except Impossible:
        raise
    except UserError:
        return  # a device without the dtype, a layout that the model does not divide into
    tokens = batch * arch.seq
    fastest = max(cluster.device.peak(compute_dtype(precision)), cluster.device.peak("bf16"))
    assert priced.step_time_s >= tokens * arch.flops_per_token() / (8 * fastest)
    assert 0 < priced.mfu <= 1
    assert priced.tokens_per_s == pytest.approx(tokens / priced.step_time_s)
    assert priced.time_band_s[0] <= priced.step_time_s <= priced.time_band_s[1]
    low, high = priced.memory_band
    assert 0 < low <= priced.memory.total <= high < math.inf
    assert priced.memory.total >= 2 * arch.parameters / 8
    assert all(size >= 0 for size in priced.memory.parts().values())


@pytest.mark.parametrize("device", DEVICES)
def test_no_rate_is_above_the_peak(device: str) -> None:
    one = catalogue()[device]
    quick = MeasuredRate("matmul", "bf16", 0.0, 1e-30, 0.0)
    for where in (one, replace(one, fitted=(("forward", 1e-3),)), replace(one, rates=(quick,))):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            for kind in PRODUCTS:
                rate = op_rate(where, dtype, kind, "", "forward")
                assert rate.time_s(1e15, 0.0) >= 1e15 / one.peak(dtype) * (1 - 1e-12)


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]),
    st.sampled_from([2, 4]),
    st.floats(1.0, 1e11),
)
@settings(max_examples=60, **SEEDED)
def test_collectives_take_what_their_link_takes(kind: Any, ranks: int, size: float) -> None:
    seconds = collective_time_s(node("H100"), kind, size, AxisGroup(ranks, 1))
    assert seconds >= size * (ranks - 1) / ranks / LINK_BYTES_PER_S


@pytest.mark.parametrize(
    ("key", "size", "flops", "seconds", "expected"),
    [
        ("matmul linear forward fp32 8x8,8x8", 1e3, 1e12, 1e-3, "above the peak of H100"),
        ("elementwise add forward fp32 8", 1e9, 1e3, 1e-7, "caches"),
    ],
)
def test_a_profile_beyond_its_device_is_left_out_and_named(
    tmp_path: Path, key: str, size: float, flops: float, seconds: float, expected: str
) -> None:
    profile, lines = tmp_path / "profile.db", list[str]()
    right = "matmul linear forward bf16 64x64,64x64"
    with ProfileDb(profile) as db:
        for name, took, count in ((key, seconds, flops), (right, 1e-3, 1e9)):
            row = Measurement("op", name, size, count, took, 0.1, 9, "2026-11-01T00:00:00+00:00")
            db.add(Machine("H100", "a driver", "torch 2.13.0"), row)
    calibrated = calibrate(node("H100"), profile, warn=lines.append)
    assert [rate.kind for rate in calibrated.device.rates if rate.kind] == ["linear"]
    assert calibrated.device.rates[0].dtype == "bf16"
    assert any(expected in line and key.split()[1] in line for line in lines)


def test_a_core_faster_than_assumed_raises_its_peak(tmp_path: Path) -> None:
    profile = tmp_path / "profile.db"
    when = "2026-11-01T00:00:00+00:00"
    with ProfileDb(profile) as db:
        for key in ("linear", "product"):
            name = f"matmul {key} forward bf16 512x512,512x512"
            row = Measurement("op", name, 1e6, 2e9, 1e-3, 0.1, 9, when)
            db.add(Machine("cpu-core", "Linux", "torch 2.13.0"), row)
    cluster = calibrate(node("cpu-core"), profile)
    assert cluster.device.peak("bf16") > 1e12 > catalogue()["cpu-core"].peak("bf16")
    check_plan(planned(1, cluster), cluster)


def test_where_no_figure_can_be_the_first_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = cluster_peak_s
    monkeypatch.setattr(alarms, "cluster_peak_s", lambda *given: 1e9 * real(*given))
    with pytest.raises(Impossible, match=r"no layout is left.*step time came out as"):
        planned(0, node("A100"))


def test_a_layout_that_cannot_be_is_left_out_and_the_search_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A figure of pipelines that is wrong does not end the search for other plans."""
    free = planned(0, node("A100"))
    wrong = [Bound("parameters of all ranks", 1.0, 2.0, why="at least the model's")]
    monkeypatch.setattr(full_price, "pipeline_bounds", lambda *_: wrong)
    result = planned(0, node("A100"))
    assert len(result.plan.stages) == 1
    priced = [lost for lost in result.plan.runners_up if not lost.reason.startswith("cannot win")]
    assert all("pp" not in lost.degrees for lost in priced)
    (told,) = result.obstacles
    assert "left out, the first" in told
    assert "parameters of all ranks came out as 1, and must be at least the model's" in told
    assert not free.obstacles
    with pytest.raises(Impossible, match="no layout is left"):
        planned(0, node("A100"), pp="2")


@pytest.mark.parametrize("value", [-1.0, 1.5, math.nan, math.inf])
def test_a_figure_out_of_its_bounds_is_impossible(value: float) -> None:
    check([Bound("the share", 1.0, 0.0, 1.0)])
    with pytest.raises(Impossible, match="the share came out as"):
        check([Bound("the share", value, 0.0, 1.0)])
