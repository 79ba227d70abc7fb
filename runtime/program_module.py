"""The files of an emitted program as modules of their own."""

from __future__ import annotations

import itertools
import linecache
import sys
from pathlib import Path
from types import ModuleType

from autopar.files import plan_folder
from autopar.runtime.settings import ProgramError, compiled

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
    missing = [name for name in ("hold", "backward", "update") if not hasattr(module, name)]
    if missing:
        raise ProgramError(
            f"{file} has no function {missing[0]}, which `autopar run` calls; put it back, or plan "
            "the model again"
        )
    return module
