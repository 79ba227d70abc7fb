"""A scheduler's SIGTERM reaches every process of a job, workers of loaders among them: the job
saves, ends with 143, and goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.runtime.pytorch.loader import Loader
from autopar.runtime.shared.kept_checkpoints import kept
from tests import warm, warm_ranks
from tests.plans import cluster
from tests.script import with_workers
from tests.script.models import Dropping, words

ROOT = Path(__file__).parents[2]
STEPS = 8
RANKS = 2


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sigterm") / "plan"
    return autopar.plan(
        Dropping, words(4), cluster(RANKS), fix={"dp_replicate": RANKS}, folder=folder
    )


def job(plan: Any, where: Path, log: Path) -> BaseProcess:
    """The script on all ranks, all in one process group, as a scheduler has them."""
    given = [os.fspath(plan), where / "checkpoints", where / "losses", STEPS]
    words = [with_workers.__file__, *map(str, given)]
    with log.open("ab") as to:
        return warm.start(warm_ranks.loose, (RANKS, words, codes_in(log)), (to, to), ROOT)


def codes_in(log: Path) -> Path:
    return log.with_name("codes.json")


def ended(ranks: BaseProcess, log: Path, seconds: float = 120.0) -> list[int]:
    """The exit codes; where they hang, the stacks of all their processes are what fails."""
    assert ranks.pid is not None
    ranks.join(seconds)
    if ranks.exitcode is None:
        kernel = states(ranks.pid)
        os.killpg(ranks.pid, signal.SIGUSR1)
        time.sleep(2.0)
        os.killpg(ranks.pid, signal.SIGKILL)
        pytest.fail(f"{kernel}\n{losses(log.parent)}\n{log.read_text()[-20000:]}")
    codes: list[int] = json.loads(codes_in(log).read_text())
    codes_in(log).unlink()
    return codes


def states(group: int) -> str:
    """What the kernel says of the processes of a group: what they wait in, which signals they
    block, and the threads that they have."""
    lines = []
    for place in Path("/proc").iterdir():
        try:
            if not place.name.isdigit() or os.getpgid(int(place.name)) != group:
                continue
            status = dict(
                line.split(":", 1) for line in (place / "status").read_text().splitlines()
            )
            wanted = ("PPid", "State", "Threads", "SigBlk", "SigCgt")
            shown = " ".join(f"{name} {status[name].strip()}" for name in wanted)
            where = [(t / "wchan").read_text() for t in (place / "task").iterdir()]
            lines.append(f"{place.name}: {shown} in {', '.join(where)}")
        except OSError:  # it has ended meanwhile
            continue
    return "\n".join(lines)


def losses(where: Path) -> dict[int, str]:
    file = where / "losses"
    rows = (line.split() for line in (file.read_text() if file.exists() else "").splitlines())
    return {int(step): loss for step, loss in rows}


def wait(ready: Any, seconds: float = 180.0) -> None:
    late = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < late
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.gloo(2)
def test_a_job_whose_workers_get_sigterm_saves_and_goes_on(plan: Any, tmp_path: Path) -> None:
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log.txt"
    for folder in (whole, broken):
        folder.mkdir()
    assert ended(job(plan, whole, log), log) == [0] * RANKS, log.read_text()
    ranks = job(plan, broken, log)
    try:
        wait(lambda: len(losses(broken)) >= 2)
        assert ranks.pid is not None
        os.killpg(ranks.pid, signal.SIGTERM)
    finally:
        codes = ended(ranks, log)
    text = log.read_text()
    assert codes == [143] * RANKS, text
    assert "SIGTERM: saved step" in text
    assert "DataLoader worker" not in text
    (saved,) = kept(broken / "checkpoints")
    stopped = int(saved.name.partition("-")[2])
    assert 2 <= stopped < STEPS
    pids = [int(line) for line in (broken / "losses.workers").read_text().split()]
    assert len(pids) == 2 * RANKS  # and the user's own function has been called
    wait(lambda: not any(map(alive, pids)), 15)
    assert ended(job(plan, broken, log), log) == [0] * RANKS, log.read_text()
    assert losses(broken) == losses(whole)
    assert set(losses(whole)) == set(range(1, STEPS + 1))


class Stuck:
    """Data whose workers do not come back by themselves."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        (self.notes / str(os.getpid())).touch()
        if i >= 2:
            time.sleep(600)
        return words(1, i)


def one_batch(notes: Path) -> Any:
    loader = Loader(Stuck(notes), 1, 0, 1, num_workers=2, prefetch_factor=2)
    reads = iter(loader)
    next(reads)
    return reads


def test_signals_are_left_to_the_parent_until_it_has_ended_the_loader(tmp_path: Path) -> None:
    reads = one_batch(tmp_path)
    wait(lambda: len(list(tmp_path.iterdir())) == 2)
    workers = [int(file.name) for file in tmp_path.iterdir()]
    for number in (signal.SIGTERM, signal.SIGINT):
        for worker in workers:
            os.kill(worker, number)
    time.sleep(0.3)
    assert all(map(alive, workers))
    reads.close()  # DataLoader waits for them, and then sends SIGTERM itself
    wait(lambda: not any(map(alive, workers)), 20)


def test_workers_that_hang_in_a_fork_are_started_again(tmp_path: Path) -> None:
    """As if a lock had been held by another thread when the first two were forked."""
    code = (
        "import os, sys, time, warnings; from pathlib import Path; "
        "from autopar.runtime.pytorch import loader_workers as w; "
        "from tests.script import test_sigterm as t; "
        "w.STARTED_S = 1.0; notes, forks = Path(sys.argv[1]), []; warnings.simplefilter('error'); "
        "warnings.filterwarnings('always', 'workers of the loader'); "
        "os.register_at_fork(before=lambda: forks.append(1), "
        "after_in_child=lambda: len(forks) <= 2 and time.sleep(600)); "
        "reads = t.one_batch(notes); reads.close(); print(len(forks), 'forks')"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=env, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "4 forks\n"), done.stderr
    assert "did not start within 1 s" in done.stderr


def test_workers_end_when_their_parent_is_gone(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.script import test_sigterm as t; "
        "notes = Path(sys.argv[1]); reads = t.one_batch(notes); "
        "t.wait(lambda: len(list(notes.iterdir())) == 2); os._exit(9)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, timeout=120)
    assert done.returncode == 9
    workers = [int(file.name) for file in tmp_path.iterdir()]
    for worker in filter(alive, workers):
        os.kill(worker, signal.SIGTERM)
    wait(lambda: not any(map(alive, workers)), 20)
