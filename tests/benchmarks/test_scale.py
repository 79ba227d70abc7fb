"""The published layouts that very large plans are compared with are layouts of their devices."""

from __future__ import annotations

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.planner.ask.candidates import candidates
from autopar.planner.ask.pins import read_pins
from benchmarks.scale import CLUSTERS, RUNS, sized


@pytest.mark.parametrize("name", RUNS)
def test_published_layouts_fill_their_devices(name: str) -> None:
    run = RUNS[name]
    cluster = sized(load_cluster(str(CLUSTERS / run.cluster)), run.devices)
    assert cluster.device_count == run.devices == cluster.levels[-1].span
    pins, _ = read_pins(run.fix, run.devices)
    assert pins.pp is not None
    assert candidates(run.devices // pins.pp, run.batch, pins)
