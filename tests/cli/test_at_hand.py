"""Measuring the CPU cores at hand: when, where it is kept, and what is said; nothing is timed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import at_hand
from autopar.cli.at_hand import quick_profile
from autopar.cost_models.bands import ASSUMED_CORE, step_band
from autopar.cost_models.calibrate import calibrate
from autopar.cost_models.profile_db import Measurement
from autopar.cost_models.profile_file import ProfileError
from autopar.files.cluster_file import load_cluster
from autopar.nouns.cluster import Cluster
from autopar.runtime.profile.cases import middle_cases
from autopar.runtime.profile.quick_sizes import LARGEST

HERE = load_cluster("examples/clusters/cpu_4.yaml")
Measured = list[int]


def measuring(others: float = 0.0, failed: str = "") -> tuple[Measured, Callable[..., str]]:
    """A stand-in for the measuring processes, and the ranks that it was called for."""
    calls: Measured = []

    def measure(db: Any, machine: Any, cluster: Cluster, *_: Any) -> str:
        calls.append(cluster.device_count)
        if not failed:
            key = "matmul linear forward fp32 64x64,64x64"
            when = "2026-11-01T00:00:00+00:00"
            db.add(machine, Measurement("op", key, 5e4, 5e5, 1e-4, 0.1, 9, when))
        return failed

    return calls, measure


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(at_hand.SWITCH)
    monkeypatch.setattr(at_hand, "_others_cores", lambda _: 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return tmp_path / "autopar"


def test_measured_once_and_kept_by_what_it_hangs_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, measure = measuring()
    monkeypatch.setattr(at_hand, "measure", measure)
    lines: list[str] = []
    profile = quick_profile(HERE, lines.append)
    assert profile is not None
    assert profile.parent == cache
    assert quick_profile(HERE, lines.append) == profile
    assert calls == [4]
    assert sum("kept in" in line for line in lines) == 1
    assert [path.name for path in cache.iterdir()] == [profile.name]  # nothing half-written
    for name, value in (("ATEN_CPU_CAPABILITY", "default"), ("MKL_ENABLE_INSTRUCTIONS", "AVX2")):
        monkeypatch.setenv(name, value)
        assert quick_profile(HERE, lines.append) != profile
    monkeypatch.setattr(at_hand, "processor", lambda: "another CPU, 2 cores")
    assert quick_profile(HERE, lines.append) != profile
    assert len(calls) == 4


def test_its_figures_price_and_its_band_is_that_of_measured_ones(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_hand, "measure", measuring()[1])
    profile = quick_profile(HERE, lambda _: None)
    assert profile is not None
    measured = calibrate(HERE, profile)
    assert measured.device.rates
    assert "measured" in measured.device.source
    assert measured.fingerprint != HERE.fingerprint
    assert calibrate(HERE, profile).fingerprint == measured.fingerprint
    assert step_band(HERE.device) == ASSUMED_CORE != step_band(measured.device)


def test_beside_other_work_it_serves_the_plans_of_an_hour(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, measure = measuring()
    monkeypatch.setattr(at_hand, "measure", measure)
    monkeypatch.setattr(at_hand, "_others_cores", lambda _: 1.5)
    lines: list[str] = []
    first = quick_profile(HERE, lines.append)
    assert first is not None
    assert "other work took 1.5 cores" in lines[-1]
    assert str(first) in lines[-1]  # what to delete
    assert quick_profile(HERE, lines.append) == first
    assert calls == [4]
    assert "measured beside other work 0 min ago; measures again in 60 min" in lines[-1]
    old = first.stat().st_mtime - at_hand.BUSY_FOR_S
    os.utime(first, (old, old))
    monkeypatch.setattr(at_hand, "_others_cores", lambda _: 0.0)
    quiet = quick_profile(HERE, lines.append)
    assert calls == [4, 4]
    assert quiet not in (None, first)
    os.utime(first)  # what a quiet machine gave goes before it
    assert quick_profile(HERE, lines.append) == quiet
    assert calls == [4, 4]


def test_where_nothing_is_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, measure = measuring()
    monkeypatch.setattr(at_hand, "measure", measure)
    others = ("h100_8", "cpu_2x2", "v5e_16")
    for name in others:
        path = Path(f"examples/clusters/{name}.yaml")
        if path.is_file():
            assert quick_profile(load_cluster(path), lambda _: None) is None, name
    with monkeypatch.context() as patch:
        patch.setattr(at_hand, "MOST_PER_CORE", 1)
        assert quick_profile(HERE, lambda _: None) is None  # four processes on two cores
    monkeypatch.setenv(at_hand.SWITCH, "0")
    assert quick_profile(HERE, lambda _: None) is None
    assert calls == []


@pytest.mark.parametrize("why", ["a rank died", "no room", "unreadable"])
def test_a_failure_is_told_and_leaves_assumed_figures(
    cache: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def breaks(*_: Any) -> str:
        raise OSError(why) if why == "no room" else ProfileError(why)

    monkeypatch.setattr(
        at_hand, "measure", measuring(failed=why)[1] if why == "a rank died" else breaks
    )
    lines: list[str] = []
    assert quick_profile(HERE, lines.append) is None
    assert why in lines[-1]
    assert "assumed" in lines[-1]
    assert list(cache.iterdir()) == []


def test_common_kinds_of_ops_are_among_the_quick_ones() -> None:
    kinds = [case.kind for case in middle_cases(LARGEST)]
    assert {"linear", "attention", "add", "gelu", "layer_norm", "embedding"} <= set(kinds)
    assert {"cross_entropy", "rms_norm", "softmax", "conv"} <= set(kinds)
    assert len(kinds) < 25
