"""Jobs from the outside: runs, resumes, dying ranks, verification of several plans at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from autopar.files import plan_folder
from autopar.nouns import plan as plans
from autopar.nouns.errors import UserError
from autopar.nouns.style import STYLES, Style
from autopar.runtime.jobs import pytorch_launch
from autopar.runtime.jobs.failures import RankFailed
from autopar.runtime.jobs.launch import run, verify, verify_many
from autopar.runtime.jobs.pytorch_launch import _ctrl_c_later, waited
from tests.runtime import folders

pytestmark = pytest.mark.gloo

MODEL = f"""
import os, signal, sys
sys.path.insert(0, {str(folders.HERE)!r})
import tiny_gpt
from autopar import Workload

def batch(step=0):
    if step == 2 and os.environ.get("RANK") == "1":
        {{fault}}
    return tiny_gpt.batch(step)

workload = Workload(model=tiny_gpt.GPT, batch=batch, learning_rate=1e-2, clip_norm=0.5)
"""


def faulty(tmp_path: Path, fault: str) -> Path:
    model = tmp_path / "model.py"
    model.write_text(MODEL.format(fault=fault))
    target = f"{model}:workload"
    mesh = {"dp_shard": 2}
    table = json.dumps({"format": 1, "rows": []})
    return folders.write(tmp_path / "plan", mesh, zero=3, workload=target, collectives=table)


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("planned", STYLES)
def test_a_run_is_compiled_as_its_program_says_or_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Style, asked: bool | None
) -> None:
    folder = folders.write(tmp_path / "plan", {"dp_shard": 2}, style=planned)
    text = (folder / plan_folder.PROGRAM / plan_folder.TRAIN).read_text()
    assert ("state.compile()" in text) == (planned == "compiled")
    assert ('state.compile("layers")' in text) == (planned == "layers")
    given: dict[str, Any] = {}

    def launched(job: str, options: dict[str, Any], *rest: object) -> dict[str, Any]:
        given.update(options)
        names = ("step_time_s", "predicted_step_time_s", "ranks", "step", "peak_memory_bytes")
        return {
            **dict.fromkeys(names, 0),
            "losses": [],
            "phases_s": {},
            "memory_is": "",
            "memory_compares": True,
            "style": "compiled",  # as the worker did
        }

    monkeypatch.setattr(pytorch_launch, "launch", launched)
    assert run(folder, 1, compile=asked).style == "compiled"
    assert given["compile"] is asked


def test_run_saves_and_another_plan_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = folders.write(tmp_path / "one", {"dp_shard": 2}, zero=3, microbatches=2)
    first = run(one, 3, save=tmp_path / "saved", save_every=2)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"step 0  loss {first.losses[0]:.6f}")
    assert all("s (predicted 0.0120 s)" in line for line in lines)
    assert (first.ranks, first.step, first.predicted_step_time_s) == (2, 3, 0.012)
    assert first.losses[2] < first.losses[1] < first.losses[0]
    two = folders.write(tmp_path / "two", {"dp_replicate": 1})
    second = run(two, 2, resume=tmp_path / "saved")
    assert (second.ranks, second.step) == (1, 5)
    assert second.losses[0] < first.losses[2]
    assert capfd.readouterr().out.startswith("step 3  loss")


def test_a_rank_that_raises_stops_all_with_its_error(tmp_path: Path) -> None:
    plan = faulty(tmp_path, 'raise OSError("the disk of rank 1 is full")')
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run(plan, 5)
    text = str(caught.value)
    assert "rank 1 of 2 failed in step 2" in text
    assert "OSError: the disk of rank 1 is full" in text
    assert "Connection closed" not in text
    line = MODEL[: MODEL.index("{fault}")].count("\n") + 1
    assert f" at {plan.parent / 'model.py'}:{line} in batch: " in text
    assert text.endswith(f"The whole traceback is in {plan / 'failure.log'}")
    assert "\n" not in text
    assert (plan / "failure.log").read_text().startswith("Traceback (most recent call last)")
    plan_folder.check_writable(plan)
    assert time.monotonic() - begin < 40


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    plan = faulty(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        run(plan, 5)


def test_a_rank_that_hangs_ends_by_the_timeout(tmp_path: Path) -> None:
    plan = faulty(tmp_path, "import time; time.sleep(3600)")
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?is)rank 0 of 2 failed in step 2.*time(d )?out"):
        run(plan, 5, timeout_s=4)
    assert time.monotonic() - begin < 40


def test_a_model_that_changed_is_refused(tmp_path: Path) -> None:
    plan = folders.write(tmp_path / "plan", {"tp": 1}, fingerprint="0123456789abcdef")
    with pytest.raises(UserError, match=r"has changed since it was planned.*0123456789abcdef"):
        run(plan, 1)


def test_verify_refuses_a_model_that_changed(tmp_path: Path) -> None:
    plan = folders.write(tmp_path / "plan", {"tp": 1}, fingerprint="0123456789abcdef")
    with pytest.raises(UserError, match=r"has changed since it was planned"):
        verify(plan)


def test_a_plan_of_another_version_of_the_tool_is_refused(tmp_path: Path) -> None:
    plan = folders.write(tmp_path / "plan", {"tp": 1})
    made = plan_folder.read_plan(plan)
    old = replace(made, fingerprints=replace(made.fingerprints, tool="0.0.1"))
    (plan / plan_folder.PLAN).write_text(plans.to_json(old))
    with pytest.raises(UserError, match=r"made by autopar 0\.0\.1"):
        run(plan, 1)


def test_a_folder_without_a_program(tmp_path: Path) -> None:
    plan = folders.write(tmp_path / "plan", {"tp": 1})
    (plan / "program" / "model.py").unlink()
    with pytest.raises(UserError, match="no whole program in"):
        run(plan, 1)
    with pytest.raises(UserError, match="autopar plan"):
        run(tmp_path / "nothing", 1)


def test_several_plans_are_verified_in_one_start(tmp_path: Path) -> None:
    text = (folders.HERE / "tiny_gpt_program.py").read_text()
    wrong = text.replace("return total / counts", "return 1.000001 * total / counts")
    assert wrong != text
    row = {"kind": "all_reduce", "axis": "dp_replicate", "size_bytes": 68_752, "count": 1}
    table = json.dumps({"format": 1, "rows": [row]})
    plans = [
        folders.write(tmp_path / "good", {"dp_replicate": 2}, collectives=table),
        folders.write(tmp_path / "low", {"tp": 2}, precision="bfloat16", microbatches=2),
        folders.write(tmp_path / "wrong", {"dp_shard": 2}, zero=2, program=wrong),
        folders.write(tmp_path / "short", {"dp_shard": 2}, zero=3, collectives=table),
    ]
    good, low, bad, short = verify_many(plans)
    assert good.passed
    assert good.collectives_match is True
    assert good.ranks == 2
    assert good.exact.largest < 1e-9
    assert 1e-9 < good.own.largest < 1e-3
    assert low.passed
    assert low.collectives_match is None
    assert low.precision == "bfloat16"
    assert 1e-4 < low.own.gradient < 0.2
    assert not bad.passed
    assert bad.exact.gradient == pytest.approx(1e-6, rel=0.01)
    assert "one of the two was edited" in bad.first_difference
    assert not short.passed
    assert short.exact.largest < 1e-9
    assert any(
        "all_gather over dp_shard: priced 0" in line for line in short.collective_differences
    )


UNSEEDED = """
import torch
from torch import nn
from autopar import Workload

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.weight).square().mean()

def batch():
    return {"x": torch.randn(8, 4)}

workload = Workload(model=Tiny, batch=batch, optimizer="sgd", learning_rate=0.1)
"""
TINY = """
from torch import nn
from autopar.runtime.pytorch.program import Parameter, Settings, local
MESH = {}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Parameter((4, 4))

    def forward(self, x):
        return (x @ local(self.weight)).square().mean() / 2
"""


def test_a_batch_of_unseeded_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(UNSEEDED)
    workload = f"{tmp_path / 'model.py'}:workload"
    plans = [
        folders.write(
            tmp_path / f"plan{zero}",
            {"dp_shard": 2},
            zero=zero,
            units="",
            workload=workload,
            program=TINY,
        )
        for zero in (0, 3)
    ]
    assert all(result.passed for result in verify_many(plans))
    one, two = (run(plan, 2).losses for plan in plans)
    assert one == pytest.approx(two, rel=1e-5)


def test_one_rank_needs_no_others(tmp_path: Path) -> None:
    plan = folders.write(tmp_path / "plan", {"dp_shard": 1, "tp": 1}, microbatches=4)
    result = verify(plan)
    assert result.passed
    assert result.ranks == 1
    assert result.issued == ()
    assert plan_folder.read_plan(plan).device_count == 1


def test_ctrl_c_stops_a_run_at_once(tmp_path: Path) -> None:
    """One quiet line, and no process stays behind."""
    with endless(tmp_path) as job:
        started = family(job.pid)
        assert len(started) == 3
        os.killpg(job.pid, signal.SIGINT)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert err == "autopar: stopped\n"
    assert not [pid for pid in started if alive(pid)]


def test_ctrl_c_while_ranks_start_leaves_none(tmp_path: Path) -> None:
    with endless(tmp_path, until="started") as job:
        started = family(job.pid)
        assert len(started) == 1
        os.killpg(job.pid, signal.SIGINT)
        _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (130, "autopar: stopped\n")
    assert not [pid for pid in started if alive(pid)]


def test_ranks_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    with endless(tmp_path) as job:
        started = family(job.pid)
        job.kill()
        late = time.monotonic() + 20
        while any(map(alive, started)):
            assert time.monotonic() < late
            time.sleep(0.1)
        job.communicate(timeout=60)


def test_no_wait_is_long_so_that_ctrl_c_is_seen() -> None:
    """One that comes after Python has looked for it, before it waits, is seen when a wait ends."""

    class Job:
        waits: ClassVar[list[float]] = []

        def wait(self, timeout: float) -> int:
            self.waits.append(timeout)
            if len(self.waits) < 3:
                raise subprocess.TimeoutExpired("job", timeout)
            return 7

    assert waited(cast("subprocess.Popen[bytes]", Job())) == 7
    assert len(Job.waits) == 3
    assert max(Job.waits) <= 1


def test_ctrl_c_waits_until_what_was_started_is_known() -> None:
    before = signal.getsignal(signal.SIGINT)
    done: list[str] = []

    def start() -> None:
        with _ctrl_c_later():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("known")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["known"]
    assert signal.getsignal(signal.SIGINT) is before


@contextmanager
def endless(tmp_path: Path, until: str = "steps") -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks without an end, once it steps or once a process of it is there."""
    folder = faulty(tmp_path, "pass")
    # What is started inherits that Ctrl-C is ignored, as it is of jobs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-m", "autopar", "run", str(folder), "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        if until == "steps":
            assert job.stdout.readline().startswith("step 0")
        while not family(job.pid):
            time.sleep(0.01)
        yield job


def family(pid: int) -> list[int]:
    """The children of a process and theirs."""
    tasks = Path(f"/proc/{pid}/task")
    own = [int(c) for task in tasks.iterdir() for c in (task / "children").read_text().split()]
    return own + [grandchild for child in own for grandchild in family(child)]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    return False
