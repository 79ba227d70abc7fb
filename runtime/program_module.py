"""The text of an emitted program as a module of its own."""

from __future__ import annotations

import itertools
import linecache
import sys
from types import ModuleType

from autopar.runtime.settings import compiled

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
