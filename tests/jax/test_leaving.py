"""A process of several that fails ends at once, and so do those that wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.gloo(2)
@pytest.mark.parametrize("end", ["fails", "leaves"])
def test_nobody_waits_for_one_that_is_gone(end: str) -> None:
    port, environment = free_port(), {**os.environ, "JAX_PLATFORMS": "cpu"}

    def process(number: int) -> tuple[int, str, str]:
        words = ["-m", "tests.jax.leaving_process", str(number), str(port), end]
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=environment
        )
        return done.returncode, done.stdout, done.stderr

    with ThreadPoolExecutor(2) as both:
        (code, out, said), (other, _, why) = both.map(process, range(2))
    assert "step 1 2.0" in out  # what was printed is not lost
    if end == "leaves":
        assert (code, other) == (0, 0), (said, why)
        return
    assert code == 1
    assert "Gloo all-reduce failed" in said  # why
    assert "process 0 of 2 ends at once" in said
    assert "heartbeat" not in said  # which is what it would have waited for
    assert other == 1
    assert "the third batch is empty" in why
    assert "process 1 of 2 ends at once" in why
