"""Where in the user's code an equation of a jaxpr stands."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

NOT_THE_USERS = (os.path.dirname(jax.__file__), os.path.dirname(__file__))

UNKNOWN = "?"
"""A place that no frame tells."""

FORWARDING = "<locals>.meth"
"""The end of the name of what hands a tracer's method on, as in ``x.astype(dtype)``."""


def frames_of(eqn: Any) -> tuple[list[tuple[str, int]], str]:
    """(file, line) of the frames of the user's own code, innermost first, and the function of JAX
    that the innermost one calls, "" where nothing is known."""
    traceback = eqn.source_info.traceback
    frames: list[tuple[str, int]] = []
    called = ""
    for frame in () if traceback is None else traceback.frames:
        if not frame.file_name.startswith(NOT_THE_USERS):
            frames.append((frame.file_name, frame.line_num))
        elif not frames and not frame.function_name.endswith(FORWARDING):
            called = frame.function_name
    return frames, called


def place_of(eqn: Any) -> str:
    """``file:line`` of the user's innermost frame, the file without its folder."""
    for file, line in frames_of(eqn)[0]:
        return f"{file.rpartition('/')[2]}:{line}"
    return UNKNOWN


def traceback_of(eqn: Any, caller: Any = None) -> Any:
    """That of ``eqn``, or of its ``caller`` where no frame of its own is the user's: a function of
    JAX that was traced before has none."""
    return caller if caller is not None and not frames_of(eqn)[0] else eqn.source_info.traceback


def scope_of(stack: str) -> str:
    """``"blocks.0/attn/jit(silu)"`` as ``"blocks.0.attn"``: named scopes only, neither transforms
    nor the equations that einsum leaves."""
    return ".".join(part for part in stack.split("/") if re.fullmatch(r"\w[\w.-]*", part))
