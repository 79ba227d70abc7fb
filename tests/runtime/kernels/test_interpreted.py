"""Kernels themselves, interpreted by triton on the CPU, beside plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.kernels.interpreted import TRIED

pytest.importorskip("triton", reason="kernels need triton: pip install autopar[kernels]")


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """What is wrong in each check, of one process: triton asks at its import whether it interprets,
    and other tests may have imported it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.kernels.interpreted"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", TRIED)
def test_interpreted(name: str, wrong: dict[str, str]) -> None:
    assert not wrong[name], wrong[name]
