"""Ranks that are forked from one process: what they find, and how the first that fails is told."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from autopar.runtime.jobs.pytorch_launch import local_launcher

pytestmark = pytest.mark.gloo(2)

RANKS = """
import json, os, signal, sys, time
import torch.distributed as dist

LOADED_BY = os.getpid()

def main():
    rank = int(os.environ["RANK"])
    what, folder = sys.argv[1:]
    if what == "meet":
        dist.init_process_group("gloo")
        rows = [None] * dist.get_world_size()
        mine = {n: os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        dist.all_gather_object(rows, [mine, LOADED_BY, os.getpid()])
        if rank == 0:
            open(f"{folder}/rows.json", "w").write(json.dumps(rows))
        os._exit(0)
    if rank == 1:
        if what == "raise":
            raise ValueError("rank 1 has had enough")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
"""


def start(folder: Path, what: str) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    (folder / "module_of_ranks.py").write_text(RANKS)
    codes = folder / "exit_codes.json"
    done = subprocess.run(
        [*local_launcher(3, codes), "-m", "module_of_ranks", what, str(folder)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, json.loads(codes.read_text()) if codes.exists() else []


def test_tests_that_start_ranks_stand_in_line(request: pytest.FixtureRequest) -> None:
    """Without its groups pytest-xdist starts the same ranks on every worker, in silence."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there is one worker")
    assert request.node.nodeid.endswith("@gloo 2")


def test_ranks_meet_and_share_what_was_imported(tmp_path: Path) -> None:
    done, codes = start(tmp_path, "meet")
    assert (done.returncode, done.stderr, codes) == (0, "", [])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["RANK"] for row, _, _ in rows] == ["0", "1", "2"]
    assert [row["LOCAL_RANK"] for row, _, _ in rows] == ["0", "1", "2"]
    assert {(row["WORLD_SIZE"], row["LOCAL_WORLD_SIZE"]) for row, _, _ in rows} == {("3", "3")}
    loaded = {by for _, by, _ in rows}
    assert len(loaded) == 1
    assert len({own for _, _, own in rows} | loaded) == 4


def test_a_rank_that_raises_stops_the_others(tmp_path: Path) -> None:
    done, codes = start(tmp_path, "raise")
    assert (done.returncode, codes) == (1, [-15, 1, -15])
    assert "ValueError: rank 1 has had enough" in done.stderr


def test_a_rank_that_is_killed_stops_the_others(tmp_path: Path) -> None:
    done, codes = start(tmp_path, "kill")
    assert (done.returncode, done.stderr, codes) == (1, "", [-15, -9, -15])
