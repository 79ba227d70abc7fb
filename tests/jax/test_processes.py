"""A JAX job of two processes: it plans once, trains, saves from both, and one process goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.runtime.checkpoint_folder import CheckpointError
from autopar.runtime.jax import checkpoint
from tests.jax import test_script as script
from tests.jax.of_several_processes import optimizer
from tests.plans import cluster

ROOT = Path(__file__).parents[2]


@pytest.mark.gloo
def test_two_processes_train_as_one_and_save_together(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (tmp_path / "taken").write_text("a file")
    command = [sys.executable, "-m", "tests.jax.of_several_processes"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [*command, str(number), str(port), str(tmp_path)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    texts = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], texts
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in texts)
    assert "taken is a file" in first.pop("refused")
    assert "process 0 failed" in second.pop("refused")
    assert first == second
    assert first["again"] == first["losses"][2]
    with jax.enable_x64(True):
        losses, params = script.by_hand(optimizer(), 3)
        assert first["losses"] == pytest.approx(losses, rel=1e-12)
        wanted = [float(script.MODEL.loss(params, script.batch(3, n))) for n in (8, 3)]
        assert first["evaluated"] == pytest.approx(wanted, rel=1e-12)
        plan = autopar.plan(
            script.MODEL.loss, script.batch(), cluster(2), {"tp": 2}, tmp_path / "plan",
            params=script.start(),
        )  # fmt: skip
        alone: Any = autopar.load(
            plan, model=script.MODEL.loss, params=script.start(), optimizer=optimizer()
        )
        alone.load(tmp_path / "checkpoint")
        assert float(alone.step(script.batch(2))) == pytest.approx(losses[2], rel=1e-12)
    assert (tmp_path / "checkpoint" / "1.state.npz").stat().st_size > 1000


def test_a_part_that_no_process_wrote_is_missed(tmp_path: Path) -> None:
    half = [checkpoint.Piece((4, 2), (0, 0), np.ones((2, 2), np.float32))]
    checkpoint.write(tmp_path / "c", {"params/w": half})
    with pytest.raises(CheckpointError, match="4 of the 8 elements of params/w"):
        checkpoint.read(tmp_path / "c", {"params/w": np.ones((4, 2), np.float32)})
