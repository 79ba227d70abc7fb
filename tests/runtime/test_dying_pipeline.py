"""A rank of a pipeline that dies in the middle of a step is told with its stage and microbatch,
and training goes on from the last checkpoint."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from autopar.cli import app
from autopar.runtime.jobs.failures import RankFailed
from autopar.runtime.jobs.launch import run
from tests.runtime import folders

pytestmark = pytest.mark.gloo(2)

MODEL = f"""
import os, signal, sys
sys.path.insert(0, {str(folders.HERE)!r})
import tiny_gpt
from autopar import Workload

def batch(step=0):
    if step == 2 and os.environ.get("RANK") == "1" and not os.path.exists("healed"):
        from autopar.runtime.pytorch.pipeline.stage_run import StageRun
        forward = StageRun.forward

        def killed(self, i, *inputs):
            if i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(self, i, *inputs)

        StageRun.forward = killed
    return tiny_gpt.batch(step)

workload = Workload(model=tiny_gpt.GPT, batch=batch, learning_rate=1e-2, clip_norm=0.5)
"""
CLUSTER = """
name: two processes
groups:
  - {device: cpu-core, count: 2}
levels:
  - {name: loopback, span: 2, bandwidth: 1 GB/s, latency: 100 us, library: gloo}
"""
LOOSE = (sys.executable, "-m", "tests.runtime.loose_ranks", "2")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = "plan model.py:workload --cluster cluster.yaml --fix pp=2,schedule=1f1b,microbatch=2"
    monkeypatch.setattr(sys, "argv", ["autopar", *words.split()])
    with suppress(SystemExit):
        app.main()
    return tmp_path / "plan"


def test_the_place_is_told_and_the_checkpoint_goes_on(plan: Path) -> None:
    saved = plan.parent / "saved"
    begin = time.monotonic()
    with pytest.raises(
        RankFailed,
        match=r"rank 1 of 2 was killed by SIGKILL.* in step 2, 1F3 \(stage 1, forward of "
        r"microbatch 3\)",
    ):
        run(plan, 5, save=saved, save_every=1, quiet=True)
    assert time.monotonic() - begin < 40
    (plan.parent / "healed").touch()
    assert run(plan, 2, resume=saved, quiet=True).step == 4


def test_those_that_are_left_stop_and_say_what_they_waited_for(plan: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(
        RankFailed,
        match=r"(?s)rank 0 of 2 failed in step 2, 0[FB]\d \(stage 0.*PipelineStopped.*"
        r"did not (come from|go to) stage 1 \(pipeline rank 1\), whose process is gone or hangs",
    ):
        run(plan, 5, quiet=True, launcher=LOOSE)
    assert time.monotonic() - begin < 40
