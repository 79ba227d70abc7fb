"""Starting the ranks of a PyTorch job, one process each, and telling how they ended.

This process needs no torch for it; the ranks do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autopar.nouns.errors import UserError
from autopar.runtime.jobs.causes import killed_by
from autopar.runtime.jobs.failures import RankFailed, failure
from autopar.runtime.jobs.host_memory import environment
from autopar.runtime.jobs.whereabouts import last_note

LOOK_S = 1.0
"""How often to look whether Ctrl-C came."""
PATIENCE_S = 2.0
"""How long killed processes may take to be gone before nobody waits for them any more."""
Launcher = Sequence[str]
"""A command that starts a Python module on every rank of a job, wherever the ranks are, given
``-m <module> <arguments>``; it waits for them and ends with 0 where all of them did."""


def launch(
    job: str, options: Mapping[str, Any], ranks: int, launcher: Launcher | None = None
) -> Any:
    """The result of a job of `autopar.runtime.jobs.pytorch_worker` on ``ranks`` processes.

    Raises `RankFailed`, or the `UserError` that a rank raised, as one of the same exit code.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as results:
        arguments = ["-m", "autopar.runtime.jobs.pytorch_worker", job, json.dumps(options), results]
        codes = Path(results) / "exit_codes.json"
        sys.stdout.flush()
        with environment():
            if launcher is None:
                code = with_its_ranks([*local_launcher(ranks, codes), *arguments])
            else:
                code = subprocess.run([*launcher, *arguments]).returncode
        if code:
            raise _failure(code, codes, Path(results), ranks)
        return json.loads((Path(results) / "result.json").read_text())


def local_launcher(ranks: int, codes: Path) -> Launcher:
    """Starts all ranks on this machine; see `autopar.runtime.jobs.local_ranks`."""
    return (sys.executable, "-m", "autopar.runtime.jobs.local_ranks", str(ranks), str(codes))


def with_its_ranks(command: Sequence[str]) -> int:
    """The exit code of a command; it and what it started end where this is interrupted."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with _ctrl_c_later():
            # A session of its own: what Ctrl-C on a terminal reaches is this process alone.
            process = subprocess.Popen(command, start_new_session=True)
        return waited(process)
    except BaseException:
        if process is not None:
            _end_group(process)
        raise


def waited(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process, when it has ended.

    Python looks for Ctrl-C before it waits: one that comes between the two would be seen when the
    wait is over. So no wait is long.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_S)


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    """Kills a process and all of its group, and waits a while until they are gone."""
    late = time.monotonic() + PATIENCE_S
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        while time.monotonic() < late:
            os.killpg(leader.pid, 0)
            time.sleep(0.01)


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Ctrl-C waits for what is inside, so that nothing is started that nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    kept = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)
    if seen:
        raise KeyboardInterrupt


def _failure(code: int, codes: Path, results: Path, ranks: int) -> UserError:
    """The first cause: a process that was killed, or the error that came first."""
    if code < 0:
        return RankFailed(f"the process that starts the ranks was killed by {killed_by(code)}")
    exit_codes = json.loads(codes.read_text()) if codes.exists() else []
    for rank, ended in enumerate(exit_codes):
        if ended < 0 and -ended != signal.SIGTERM:
            at = last_note(results, rank)
            return RankFailed(
                f"rank {rank} of {ranks} was killed by {killed_by(ended, at)}; "
                "the other ranks were stopped"
            )
    reports = [json.loads(file.read_text()) for file in results.glob("error-*.json")]
    stopped = [rank for rank, ended in enumerate(exit_codes) if ended == -signal.SIGTERM]
    if not reports and stopped:  # of which each but the first may have been by this job
        who = f"rank{'s' * (len(stopped) > 1)} {', '.join(map(str, stopped))} of {ranks}"
        return RankFailed(f"{who} ended by {killed_by(-signal.SIGTERM)}")
    if not reports:
        ends = ", ".join(f"rank {r}: exit code {c}" for r, c in enumerate(exit_codes))
        return RankFailed(
            f"the job stopped without an error message ({ends or f'exit code {code}'})"
        )
    first = min(reports, key=lambda report: report["time"])
    return failure(first, f"rank {first['rank']} of {ranks}")
