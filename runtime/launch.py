"""Starting a job on this machine: one process per rank, by torchrun's own agent.

Importing this module needs no torch; `run` and `verify_many` do.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from autopar import plan_folder
from autopar.errors import UserError
from autopar.nouns.style import Style
from autopar.runtime.failures import RankFailed, failure
from autopar.runtime.host_memory import environment
from autopar.runtime.machine import check_device, check_machine
from autopar.runtime.save_target import check_target
from autopar.runtime.verified import VerifyResult

TIMEOUT_S = 300.0
PATIENCE_S = 5.0
"""How long ranks may take to end after Ctrl-C; the agent stops them in much less."""

_DEADLY = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

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


def launch(job: str, options: dict[str, Any], ranks: int, launcher: Launcher | None = None) -> Any:
    """Runs a job of `autopar.runtime.worker` on ``ranks`` processes and returns its result.

    Raises `RankFailed`, or the `UserError` that a rank raised, as one of the same exit code.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as results:
        arguments = ["-m", "autopar.runtime.worker", job, json.dumps(options), results]
        sys.stdout.flush()
        with environment():
            if launcher is None:
                failures = _torchrun(arguments, ranks, results)
            else:
                code = subprocess.run([*launcher, *arguments]).returncode
                failures = {} if code else None
        if failures is not None:
            raise _failure(failures, Path(results), ranks)
        return json.loads((Path(results) / "result.json").read_text())


def _torchrun(arguments: list[str], ranks: int, results: str) -> dict[int, Any] | None:
    """None, or the failures of the job by rank."""
    with _interrupts_kept():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent logs the same failure in several places; the caller gets it once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=os.path.basename(results),
        max_restarts=0,
        monitor_interval=0.1,
        # Ctrl-C is left to Python: of itself the agent would hand it on, for each rank to die of
        # with a traceback. As the exception passes, it stops them without.
        signals_to_handle=",".join(name.name for name in _DEADLY),
    )
    others = _children()
    try:
        with _interrupts_kept(others), _signals_restored():
            elastic_launch(config, sys.executable)(*arguments)
    except KeyboardInterrupt:
        # The agent knows nothing of ranks that it was still starting.
        _kill_all_but(others)
        raise
    except ChildFailedError as error:
        return dict(error.failures)
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    return None


def _children() -> set[int]:
    """Processes that this one started; none where the system does not tell."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in lists for pid in file.read_text().split()}


def _kill_all_but(others: set[int]) -> None:
    for pid in _children() - others:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def _interrupts_kept(others: set[int] | None = None) -> Iterator[None]:
    """Ctrl-C stops what is inside also where its exception is lost, as in a destructor.

    Where ``others`` are given, every process that is not among them is killed after a while, so
    that whoever waits for it goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    late = threading.Timer(PATIENCE_S, _kill_all_but, [others])
    late.daemon = True

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if others is not None and not seen:
            late.start()
        seen = True
        raise KeyboardInterrupt

    kept = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except Exception:  # whatever comes of the processes that were killed
        if not seen:
            raise
    finally:
        late.cancel()
        signal.signal(signal.SIGINT, kept)
    if seen:
        raise KeyboardInterrupt


@contextmanager
def _signals_restored() -> Iterator[None]:
    """What the agent does with signals ends with it."""
    kept = {name: signal.getsignal(name) for name in _DEADLY}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for name, handler in kept.items():
                signal.signal(name, handler)


def _failure(failures: dict[int, Any], results: Path, ranks: int) -> UserError:
    """The first cause: a process that was killed, or the error that came first."""
    for rank, found in failures.items():
        if found.exitcode < 0 and -found.exitcode != signal.SIGTERM:
            name = signal.Signals(-found.exitcode).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return RankFailed(
                f"rank {rank} of {ranks} was killed by {name}{hint}; the other ranks were stopped"
            )
    reports = [json.loads(file.read_text()) for file in results.glob("error-*.json")]
    if not reports:
        codes = ", ".join(f"rank {r}: exit code {f.exitcode}" for r, f in failures.items())
        return RankFailed(f"the job stopped without an error message ({codes or 'all ranks'})")
    first = min(reports, key=lambda report: report["time"])
    return failure(first, f"rank {first['rank']} of {ranks}")
