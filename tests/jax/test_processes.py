"""A JAX job of two processes: it plans once, trains, saves from both, and one process goes on."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.runtime.jax import checkpoint
from autopar.runtime.shared.checkpoint_folder import CheckpointError
from tests import warm
from tests.jax import test_script as script
from tests.jax.of_several_processes import optimizer
from tests.plans import cluster
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.gloo
def test_two_processes_train_as_one_and_save_together(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "taken").write_text("a file")
    module, environment = "tests.jax.of_several_processes", {**os.environ, "JAX_PLATFORMS": "cpu"}

    def process(number: int) -> tuple[int, str, str]:
        words = ["-m", module, str(number), str(port), str(tmp_path)]
        return warm.done(warm.python, [words], ROOT, environment)

    with ThreadPoolExecutor(2) as both:
        (code, out, _), (other, its_out, _) = texts = list(both.map(process, range(2)))
    assert (code, other) == (0, 0), texts
    first, second = (json.loads(text.splitlines()[-1]) for text in (out, its_out))
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
