"""Where an error was raised, and how much of it is told."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

from autopar.files import plan_folder

LONGEST = 400  # characters of a message; the file has the rest

_OWN = tuple(
    str(folder) + os.sep
    for folder in (
        Path(plan_folder.__file__).parents[1],
        Path(__file__).resolve().parents[1],
        *(Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib", "stdlib")),
    )
)


def place(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame of the program or of the user's files.

    Empty where libraries and this package alone are to be seen.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*_OWN, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
