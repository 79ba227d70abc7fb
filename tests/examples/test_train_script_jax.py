"""The complete training script in JAX: stopped on four devices, gone on with on two."""

from __future__ import annotations

import os
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.examples.script_logs import losses_of
from tests.plans import cluster_text
from tests.warm import code_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/08_train_script_jax.py"
COUNT = "--xla_force_host_platform_device_count="


def test_ten_of_at_most_130_lines_are_autopars() -> None:
    lines = SCRIPT.read_text().splitlines()
    own = [line for line in lines if re.search(r"^import autopar|autopar\.\w+\(|trainer\.", line)]
    assert len(lines) < 130
    assert len(own) <= 10


def start(devices: int, output: Path, log: Path, fix: str) -> BaseProcess:
    output.mkdir(exist_ok=True)
    cluster = output / f"{devices}.yaml"
    cluster.write_text(cluster_text(devices))
    arguments = ["--cluster", cluster, "--fix", fix, "--output", output, "--dtype", "float64"]
    arguments += ["--steps", "12", "--evaluate-every", "6"]
    words = [str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {COUNT}{devices}"}
    with log.open("wb") as to:
        return warm.start(warm.python, [words], (to, to), ROOT, environment)


@pytest.mark.gloo
def test_stopped_and_gone_on_with_it_is_what_it_would_have_been(tmp_path: Path) -> None:
    whole, first, second = (tmp_path / f"{name}.txt" for name in ("whole", "first", "second"))
    assert code_of(start(4, tmp_path / "whole", whole, "dp_shard=2,tp=2,zero=3"), 120) == 0
    broken = start(4, tmp_path / "broken", first, "dp_shard=2,tp=2,zero=3")
    try:
        late = time.monotonic() + 60
        while "step 4 " not in first.read_text() and time.monotonic() < late:
            time.sleep(0.002)
        assert broken.pid is not None
        os.kill(broken.pid, signal.SIGTERM)
        assert code_of(broken, 60) == 143, first.read_text()
    finally:
        broken.kill()
    assert "SIGTERM: saved step" in first.read_text()
    assert code_of(start(2, tmp_path / "broken", second, "tp=2"), 120) == 0
    wanted, seen = losses_of(whole), losses_of(first, second)
    assert wanted.keys() == seen.keys()
    assert ("12", "held out") in wanted
    assert max(abs(seen[key] - wanted[key]) for key in wanted) < 1e-12
    ends = [np.load(tmp_path / name / "weights.npz") for name in ("whole", "broken")]
    assert all(np.abs(ends[0][name] - ends[1][name]).max() < 1e-12 for name in ends[0])
