"""Starting a job on this machine, one process per rank, and telling how it ended.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar import plan_folder
from autopar.errors import UserError
from autopar.nouns.plan import Plan
from autopar.nouns.style import Style
from autopar.runtime.checkpoint_folder import check_source
from autopar.runtime.failures import RankFailed, failure
from autopar.runtime.host_memory import environment
from autopar.runtime.machine import check_device, check_machine
from autopar.runtime.save_target import check_target
from autopar.runtime.stale import check_tool
from autopar.runtime.verified import VerifyResult

TIMEOUT_S = 300.0
PATIENCE_S = 2.0
"""How long killed processes may take to be gone before nobody waits for them any more."""
Launcher = Sequence[str]
"""A command that starts a Python module on every rank of a job, wherever the ranks are, given
``-m <module> <arguments>``; it waits for them and ends with 0 where all of them did."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """``losses`` of the steps that were run; times in seconds, ``step_time_s`` their median.

    ``peak_memory_bytes`` is that of the fullest process; 0 where it was not measured. It is what
    ``memory_is`` says; ``memory_compares``: the prediction is of the same. ``phases_s``
    are medians on the first rank, by `autopar.runtime.phases`; empty where not told apart.
    ``style``: how the program was executed.
    """

    losses: tuple[float, ...]
    step_time_s: float
    predicted_step_time_s: float
    ranks: int
    step: int
    peak_memory_bytes: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_is: str = ""
    memory_compares: bool = True
    style: Style = "eager"


def run(
    folder: str | Path,
    steps: int,
    *,
    compile: bool | None = None,
    resume: str | Path | None = None,
    save: str | Path | None = None,
    save_every: int = 0,
    device: str = "auto",
    timeout_s: float = TIMEOUT_S,
    quiet: bool = False,
    launcher: Launcher | None = None,
) -> RunResult:
    """Trains ``steps`` steps of the plan in ``folder``; loss and time of each go to stdout.

    compile:    whether torch compiles the program; None: as the plan says. JAX always compiles.
    resume:     a checkpoint of any plan of the same model, to go on from.
    save:       where a checkpoint goes at the end, and after every ``save_every`` steps.
    timeout_s:  how long a rank waits for one that hangs; one that dies stops the job at once.
    quiet:      the steps are not printed.
    launcher:   starts the ranks where they are not all on this machine; see `Launcher`.

    Raises `RankFailed`, and what `autopar.load` raises.
    """
    if steps < 0:
        raise UserError(f"--steps {steps}: give a number of steps, as in --steps 20")
    check_device(device)
    plan = plan_folder.read_plan(folder)
    if launcher is None:
        check_machine(plan, folder, device)
        if save:
            check_target(save, plan.framework)
        if resume:
            check_source(resume, plan.framework)
    _check_current(plan, folder)
    if plan.framework == "jax":
        if compile is False:
            raise UserError(f"{folder} is a plan for JAX, which always compiles: leave --eager out")
        from autopar.runtime import jax_launch

        return jax_launch.run(
            folder, steps, resume=resume, save=save, save_every=save_every, device=device
        )
    style: Style = plan.style if compile is None else "compiled" if compile else "eager"
    options = {
        "plan": str(folder),
        "steps": steps,
        "compile": style == "compiled",
        "resume": str(resume) if resume else None,
        "save": str(save) if save else None,
        "save_every": save_every,
        "device": device,
        "timeout_s": timeout_s,
        "quiet": quiet,
    }
    found = launch("run", options, plan.device_count, launcher)
    return RunResult(
        tuple(found["losses"]),
        found["step_time_s"],
        found["predicted_step_time_s"],
        found["ranks"],
        found["step"],
        found["peak_memory_bytes"],
        found["phases_s"],
        found["memory_is"],
        found["memory_compares"],
        style,
    )


def verify(folder: str | Path, device: str = "cpu") -> VerifyResult:
    """Compares the plan in ``folder`` with its model on its ranks; see `VerifyResult`.

    Raises `RankFailed`, and what loading the plan raises.
    """
    return verify_many([folder], device)[0]


def verify_many(
    folders: Sequence[str | Path], device: str = "cpu", timeout_s: float = TIMEOUT_S
) -> list[VerifyResult]:
    """`verify` for several plans, with one start of the processes for each number of ranks."""
    check_device(device)
    by_ranks: dict[int, list[str]] = {}
    jax: list[str] = []
    for folder in folders:
        plan = plan_folder.read_plan(folder)
        check_machine(plan, folder, device)
        _check_current(plan, folder)
        if plan.framework == "jax":
            jax.append(str(folder))
        else:
            by_ranks.setdefault(plan.device_count, []).append(str(folder))
    found: dict[str, VerifyResult] = {}
    if jax:
        from autopar.runtime import jax_launch

        found |= dict(zip(jax, jax_launch.verify_many(jax, device), strict=True))
    for ranks, group in by_ranks.items():
        options = {"plans": group, "device": device, "timeout_s": timeout_s}
        for data in launch("verify", options, ranks):
            found[data["plan"]] = VerifyResult.read(data)
    return [found[str(folder)] for folder in folders]


def _check_current(plan: Plan, folder: str | Path) -> None:
    """Refuses, before anything starts, a plan of another version or without a program."""
    check_tool(plan)
    plan_folder.code_of(folder, plan.framework)


def launch(job: str, options: dict[str, Any], ranks: int, launcher: Launcher | None = None) -> Any:
    """Runs a job of `autopar.runtime.worker` on ``ranks`` processes and returns its result.

    Raises `RankFailed`, or the `UserError` that a rank raised, as one of the same exit code.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as results:
        arguments = ["-m", "autopar.runtime.worker", job, json.dumps(options), results]
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
    """Starts all ranks on this machine; see `autopar.runtime.local_ranks`."""
    return (sys.executable, "-m", "autopar.runtime.local_ranks", str(ranks), str(codes))


def with_its_ranks(command: Sequence[str]) -> int:
    """The exit code of a command; it and what it started end where this is interrupted."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with _ctrl_c_later():
            # A session of its own: what Ctrl-C on a terminal reaches is this process alone.
            process = subprocess.Popen(command, start_new_session=True)
        return process.wait()
    except BaseException:
        if process is not None:
            _end_group(process)
        raise


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
        return RankFailed(f"the process that starts the ranks was killed by {_signal(code)}")
    found = json.loads(codes.read_text()) if codes.exists() else []
    for rank, ended in enumerate(found):
        if ended < 0 and -ended != signal.SIGTERM:
            return RankFailed(
                f"rank {rank} of {ranks} was killed by {_signal(ended)}; "
                "the other ranks were stopped"
            )
    reports = [json.loads(file.read_text()) for file in results.glob("error-*.json")]
    if not reports:
        ends = ", ".join(f"rank {r}: exit code {c}" for r, c in enumerate(found))
        return RankFailed(
            f"the job stopped without an error message ({ends or f'exit code {code}'})"
        )
    first = min(reports, key=lambda report: report["time"])
    return failure(first, f"rank {first['rank']} of {ranks}")


def _signal(code: int) -> str:
    name = signal.Signals(-code).name
    return f"{name} (out of memory?)" if name == "SIGKILL" else name
