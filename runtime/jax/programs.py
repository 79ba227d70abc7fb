"""The files of an emitted JAX program as modules: ``parallel.py``, and what stands on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import jax
import numpy as np

from autopar.emit.jax.how import How
from autopar.emit.jax.train import train_text
from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.pipeline.actions import to_text
from autopar.runtime.jax import parallel
from autopar.runtime.jax.staged import Pipeline, pipeline_of
from autopar.runtime.jax.step import Step, step_of
from autopar.runtime.shared import program_module
from autopar.runtime.shared.imported import importable, imported
from autopar.runtime.shared.settings import ProgramError, check_settings

_NAME = plan_folder.PARALLEL.removesuffix(".py")


class TooFewDevices(UserError):
    """The plan is for more devices than jax sees."""


def read_step(folder: str | Path, workload: Workload, lift: str | None = None) -> Step | Pipeline:
    """The step of the program in a plan folder; ``lift`` is for every float that it names.

    Raises `PlanFolderError`, `ProgramError`, `TooFewDevices`.
    """
    base = read_parallel(folder)
    model = read_program(folder, lift, base)
    with importable(_NAME, base):
        train = program_module.read_train(folder)
    lists = program_module.read_lists(folder, plan_folder.read_plan(folder))
    if lists:
        return pipeline_of(model, workload, train, to_text(lists))
    return step_of(model, workload, train)


def read_program(
    folder: str | Path, lift: str | None = None, base: ModuleType | None = None
) -> ModuleType:
    """Runs ``model.py`` of a plan folder on ``base``, by default its own ``parallel.py``."""
    file = plan_folder.code_of(folder, plan_folder.MODEL)
    module = run_program(file.read_text(), str(file), lift, base or read_parallel(folder))
    check_settings(plan_folder.read_plan(folder), module.MESH, module.SETTINGS)
    return module


def read_parallel(folder: str | Path) -> ModuleType:
    """Runs ``parallel.py`` of a plan folder. Raises `PlanFolderError`, `ProgramError`."""
    file = plan_folder.code_of(folder, plan_folder.PARALLEL)
    return program_module.run_program(file.read_text(), str(file))


def run_program(
    text: str, file: str = "<program>", lift: str | None = None, base: ModuleType = parallel
) -> ModuleType:
    """Runs the text of a ``model.py`` as a module of its own, on ``base`` as its ``parallel.py``;
    see `lifted`. Raises `TooFewDevices`."""
    with lifted(base, lift), importable(_NAME, base):
        module = program_module.run_program(text, file)
    if not (hasattr(module, "loss") or hasattr(module, "STAGES")):
        raise ProgramError(
            f"{file} is no JAX program of autopar: it has no function `loss`, and no STAGES"
        )
    needed, seen = math.prod(module.MESH.values()), jax.device_count()
    if needed > seen:
        raise TooFewDevices(
            f"the plan is for {needed} devices, jax sees {seen}. On a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}, or use `autopar run`; "
            "else plan for the devices there are"
        )
    return module


def step_alone(program: ModuleType, workload: Workload, base: ModuleType = parallel) -> Step:
    """The step of a ``model.py`` that `run_program` ran on ``base``, with the ``train.py`` that
    `autopar.emit.jax.train` gives."""
    layout = parallel.Layout.of(program)
    mesh, settings = Mesh(tuple(layout.mesh), tuple(layout.mesh.values())), layout.settings
    slots = parallel.SLOTS.get(workload.optimizer, ())
    how = How(
        mesh,
        settings.zero,
        settings.microbatches,
        workload.clip_norm,
        slots=slots,
        precision=settings.precision,
        frozen=bool(layout.frozen),
        outputs=hasattr(program, "OUTPUTS"),
        pieces=any(leaf.summed != layout.data_axes for leaf in layout.leaves.values()),
        reduce=settings.reduce_dtype or "",
        scatters=settings.scatters,
    )
    with importable(_NAME, base):
        train = program_module.run_program(train_text(how), "<train.py>")
    return step_of(program, workload, train)


def pipeline_alone(
    files: Mapping[str, str], workload: Workload, lift: str | None = None
) -> Pipeline:
    """The pipeline of a program's files, by name, on our own modules; see `read_step`."""
    model = run_program(files[plan_folder.MODEL], lift=lift)
    with importable(_NAME, parallel):
        train = program_module.run_program(files[plan_folder.TRAIN], "<train.py>")
    return pipeline_of(model, workload, train, files[plan_folder.SCHEDULE])


def import_all(files: Mapping[str, str]) -> None:
    """Imports each file of a program, by name, that was written right now. Raises
    `BrokenProgram`."""
    base = imported(files[plan_folder.PARALLEL], f"{plan_folder.PROGRAM}/{plan_folder.PARALLEL}")
    with importable(_NAME, base):
        for name in plan_folder.CODE:
            imported(files[name], f"{plan_folder.PROGRAM}/{name}")


@contextmanager
def lifted(base: ModuleType, dtype: str | None) -> Iterator[None]:
    """Inside, programs that are read mean ``dtype`` by every float; None: what they say."""
    names = ("FP32", "BF16", "FP16")
    before = {name: getattr(base, name) for name in names if hasattr(base, name)}
    try:
        for name in before if dtype is not None else ():
            setattr(base, name, np.dtype(dtype))
        yield
    finally:
        for name, known in before.items():
            setattr(base, name, known)
