"""Where in the user's files something stands or failed, as ``file:line``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

UNKNOWN = "?"


def last_line(error: BaseException, internal: Callable[[str], bool]) -> str:
    """``file:line`` of the innermost frame of ``error`` whose file is not ``internal``; else
    `UNKNOWN`."""
    place = UNKNOWN
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not internal(file):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def caller(frame: FrameType | None, internal: Callable[[str], bool]) -> str:
    """``file:line`` of the innermost frame from ``frame`` on whose file is not ``internal``; else
    `UNKNOWN`."""
    while frame is not None and internal(frame.f_code.co_filename):
        frame = frame.f_back
    return UNKNOWN if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def declared(code: Any, internal: Callable[[str], bool]) -> str:
    """``file:line`` where a function or class is written; `UNKNOWN` where it has no source of the
    user's."""
    try:
        code = inspect.unwrap(code)
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (OSError, TypeError, ValueError):
        return UNKNOWN
    return UNKNOWN if file is None or internal(file) else f"{file}:{line}"
