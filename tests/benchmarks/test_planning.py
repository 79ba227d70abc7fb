"""A full-size model is planned within the memory of a small machine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.planning import RSS_LIMIT_GB, plan_once

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_llama_8b_is_planned_for_256_devices_within_1_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = plan_once("8b")
    assert math.prod(report["degrees"].values()) == 256
    assert report["rss_gb"] < RSS_LIMIT_GB
    assert 0 < sum(report["phases"].values()) < report["cpu_s"]
