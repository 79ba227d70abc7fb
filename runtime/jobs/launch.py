"""Running and verifying plans on this machine, of either framework.

`pytorch_launch` starts one process a rank, `jax_launch` one that sees all devices; this process
needs neither framework for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.nouns.style import style_of
from autopar.runtime.jobs import jax_launch, pytorch_launch
from autopar.runtime.jobs.machine import check_device, check_machine
from autopar.runtime.jobs.pytorch_launch import Launcher
from autopar.runtime.jobs.result import RunResult
from autopar.runtime.shared.checkpoint_folder import check_source
from autopar.runtime.shared.kept_checkpoints import candidates
from autopar.runtime.shared.save_target import check_target
from autopar.runtime.shared.stale import check_tool
from autopar.runtime.verify.verified import VerifyResult

TIMEOUT_S = 300.0


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
        if resume and candidates(resume) == [Path(resume)]:  # of several a whole one is taken
            check_source(resume, plan.framework)
    _check_current(plan, folder)
    options = {
        "plan": str(folder),
        "steps": steps,
        "resume": str(resume) if resume else None,
        "save": str(save) if save else None,
        "save_every": save_every,
        "quiet": quiet,
    }
    if plan.framework == "jax":
        if compile is False:
            raise UserError(f"{folder} is a plan for JAX, which always compiles: leave --eager out")
        measured = jax_launch.launch("run", options, plan.device_count, device)
        measured["style"] = style_of("jax")
    else:
        options |= {"compile": compile, "device": device, "timeout_s": timeout_s}
        measured = pytorch_launch.launch("run", options, plan.device_count, launcher)
    return RunResult(**{**measured, "losses": tuple(measured["losses"])})


def verify(folder: str | Path, device: str = "cpu") -> VerifyResult:
    """Compares the plan in ``folder`` with its model on its ranks; see `VerifyResult`.

    Raises `RankFailed`, and what loading the plan raises.
    """
    return verify_many([folder], device)[0]


AT_ONCE = 20
"""Plans that the same processes verify. Each leaves its process groups, whose threads share the
cores: 105 plans left a rank 964. To end a group is no way out: PyTorch gives its name, and so its
keys in the store, to the next of its ranks."""


def verify_many(
    folders: Sequence[str | Path], device: str = "cpu", timeout_s: float = TIMEOUT_S
) -> list[VerifyResult]:
    """`verify` for several plans, with one start of the processes for up to `AT_ONCE` plans of as
    many ranks."""
    check_device(device)
    groups: dict[tuple[str, int], list[str]] = {}
    for folder in folders:
        plan = plan_folder.read_plan(folder)
        check_machine(plan, folder, device)
        _check_current(plan, folder)
        groups.setdefault((plan.framework, plan.device_count), []).append(str(folder))
    results: dict[str, VerifyResult] = {}
    jobs = [
        (*kind, group[start : start + AT_ONCE])
        for kind, group in groups.items()
        for start in range(0, len(group), AT_ONCE)
    ]
    for framework, devices, group in jobs:
        options = {"plans": group, "device": device, "timeout_s": timeout_s}
        if framework == "jax":
            verified = jax_launch.launch("verify", options, devices, device)
        else:
            verified = pytorch_launch.launch("verify", options, devices)
        for place, data in zip(group, verified, strict=True):
            results[place] = VerifyResult.read(data)
    return [results[str(folder)] for folder in folders]


def _check_current(plan: Plan, folder: str | Path) -> None:
    """Refuses, before anything starts, a plan of another version or without a program."""
    check_tool(plan)
    plan_folder.code_of(folder, plan_folder.MODEL)
