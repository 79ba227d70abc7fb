"""A program as a module, right after it was written: what does not parse or import is told."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from autopar.nouns.errors import UserError


class BrokenProgram(UserError):
    """A program that was written and cannot run."""


def imported(text: str, file: str) -> ModuleType:
    """The module that ``text`` is, under the name that ``file`` has.

    Raises `BrokenProgram` with the line that fails.
    """
    module = ModuleType(file.rpartition("/")[2].removesuffix(".py"))
    module.__file__ = file
    try:
        with importable(module.__name__, module):  # where dataclasses look it up
            exec(compile(text, file, "exec"), module.__dict__)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise broken(f"{file}:{error.lineno}: {error.msg}: {line}") from error
    except Exception as error:  # whatever its imports and declarations can raise
        raise failed(error, text, file) from error
    return module


@contextmanager
def importable(name: str, module: ModuleType) -> Iterator[None]:
    """Inside, ``name`` is ``module``, and no other that has it."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def failed(error: Exception, text: str, file: str) -> BrokenProgram:
    """What to say of an error that came out of a line of the program."""
    lines = text.splitlines()
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file and frame.lineno:
            place = f"{file}:{frame.lineno}: {lines[frame.lineno - 1].strip()}: "
    first = (str(error).strip().splitlines() or [""])[0]
    return broken(f"{place}{type(error).__name__}: {first}")


def broken(what: str) -> BrokenProgram:
    return BrokenProgram(
        f"the program that was written for this plan cannot run, so no plan was written: {what}. "
        "This is a defect of autopar, not of the model: please report it with the model. Another "
        "layout, as with --fix tp=1, may not meet it"
    )
