"""From a plan folder to a trainer of its JAX program, with everything checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from autopar.files import plan_folder
from autopar.frontends.jax import Captured, paths_of
from autopar.frontends.jax.capture import capture_workload
from autopar.frontends.loading import load_workload
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload
from autopar.runtime import program_module
from autopar.runtime.jax import program as jax_program
from autopar.runtime.jax.layout import by_name
from autopar.runtime.jax.step import Step
from autopar.runtime.jax.trainer import Trainer
from autopar.runtime.settings import (
    ProgramError,
    check_settings,
    check_workload,
    tell_changes,
)
from autopar.runtime.stale import changed_batch, check_fingerprint, check_tool


class TooFewDevices(UserError):
    """The plan is for more devices than jax sees."""


def load(folder: str | Path, check_model: bool = True) -> Trainer:
    """The trainer of the plan in ``folder``, with the initial parameters of the workload.

    Raises `StalePlan`, `TooFewDevices`, and what reading the folder raises.
    """
    plan = plan_folder.read_plan(folder)
    workload = load_workload(plan_folder.workload_of(folder, plan))
    captured = capture_workload(workload)
    if check_model:
        check_model_of(plan, captured, workload, folder)
    assert workload.init is not None
    init = workload.init
    step = Step(read_program(folder), workload)

    def parameters() -> Mapping[str, Any]:
        tree = init(jax.random.key(workload.seed))
        return step.layout.gather_names(by_name(paths_of(tree), captured.stacks))

    planned = plan_folder.read_batch(folder)
    return Trainer(workload, step, step.initial(parameters, captured.constants), planned=planned)


def check_model_of(plan: Plan, captured: Captured, workload: Workload, folder: str | Path) -> None:
    """Raises `StalePlan` where ``captured`` is not what was planned, or not by this version, and
    `StaleSettings` where ``workload`` trains it otherwise."""
    check_tool(plan)
    check_workload(plan, workload)
    check_fingerprint(plan, captured.fingerprint(), changed_batch(folder, captured.batch))
    tell_changes(plan, workload, captured.digests)


def read_program(folder: str | Path, lift: str | None = None) -> ModuleType:
    """Runs ``program/train.py`` of a plan folder; ``lift`` is for every float that it names."""
    file = plan_folder.code_of(folder, "jax")
    module = run_program(file.read_text(), str(file), lift)
    check_settings(plan_folder.read_plan(folder), module.MESH, module.SETTINGS)
    return module


@contextmanager
def lifted(dtype: str | None) -> Iterator[None]:
    """Inside, programs that are read mean ``dtype`` by every float; None: what they say."""
    names = ("FP32", "BF16", "FP16")
    before = {name: getattr(jax_program, name) for name in names}
    try:
        for name in names if dtype is not None else ():
            setattr(jax_program, name, np.dtype(dtype))
        yield
    finally:
        for name, known in before.items():
            setattr(jax_program, name, known)


def run_program(text: str, file: str = "<program>", lift: str | None = None) -> ModuleType:
    """Runs the text of a program as a module of its own, see `lifted`. Raises `TooFewDevices`."""
    with lifted(lift):
        module = program_module.run_program(text, file)
    if not hasattr(module, "loss"):
        raise ProgramError(f"{file} is no JAX program of autopar: it has no function `loss`")
    needed, seen = int(np.prod([1, *module.MESH.values()])), jax.device_count()
    if needed > seen:
        raise TooFewDevices(
            f"the plan is for {needed} devices, jax sees {seen}. On a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}, or use `autopar run`; "
            "else plan for the devices there are"
        )
    return module
