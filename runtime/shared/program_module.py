"""The files of an emitted program as modules of their own."""

from __future__ import annotations

import itertools
import linecache
import sys
from pathlib import Path
from types import ModuleType

from autopar.files import plan_folder
from autopar.nouns.plan import Plan
from autopar.pipeline.actions import Lists, ScheduleError
from autopar.pipeline.schedules.of_plan import lists_of
from autopar.runtime.shared.settings import ProgramError, compiled

_serial = itertools.count()


def run_program(text: str, file: str = "<program>") -> ModuleType:
    """Runs ``text``, which is that of ``file``. Raises `ProgramError` where it is no Python."""
    name = f"autopar_program_{next(_serial)}"
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module  # dataclasses and torch.compile look it up by name
    # tracebacks and torch.compile show the lines of a text that is in no file
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compiled(text, file), module.__dict__)
    return module


def read_train(folder: str | Path) -> ModuleType:
    """Runs ``program/train.py`` of a plan folder. Raises `PlanFolderError`, `ProgramError`."""
    file = plan_folder.code_of(folder, plan_folder.TRAIN)
    module = run_program(file.read_text(), str(file))
    plan = plan_folder.read_plan(folder)
    ends = "summed" if plan.framework == "jax" and len(plan.stages) > 1 else "backward"
    missing = [name for name in ("hold", ends, "update") if not hasattr(module, name)]
    if missing:
        raise ProgramError(
            f"{file} has no function {missing[0]}, which `autopar run` calls; put it back, or plan "
            "the model again"
        )
    return module


def read_lists(folder: str | Path, plan: Plan) -> Lists:
    """What ``program/schedule.txt`` has each pipeline rank do; none of a plan of one stage.

    Raises `PlanFolderError`, `ProgramError`.
    """
    if len(plan.stages) == 1:
        return ()
    file = plan_folder.code_of(folder, plan_folder.SCHEDULE)
    try:
        return lists_of(plan, file.read_text())
    except ScheduleError as error:
        raise ProgramError(f"{file}: {error}; put it back, or plan the model again") from None
