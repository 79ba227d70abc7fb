"""What a rehearsal finds, where, and which waits of the host are meant."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_OWN = str(Path(__file__).parent)
_RUNTIME = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that would go wrong, or slow, on an accelerator.

    kind:   mixes (tensors of two devices in one op), waits (the host for the device), races (a
            stream reads or writes without waiting for another), refused (by NCCL), fails (all
            else that ends the step).
    what:   the op, and what about it.
    where:  ``file:line in function``, the innermost that is the program's, the user's or autopar's.
    reason: of a wait that is meant: why; empty: it is not.
    times:  how often in the steps that were rehearsed.
    """

    kind: str
    what: str
    where: str
    reason: str = ""
    times: int = 1


_BATCH = "a batch that is not in pinned memory is copied before the host goes on"
MEANT: tuple[tuple[str, str, str], ...] = (
    ("train.py", "main", "the loss is printed"),
    ("loss_scale.py", "skips", "whether a step is left out decides what the host does next"),
    ("experts.py", "_products", "without torch's kernel for groups the host cuts by experts' rows"),
    ("dispatch.py", "on_host", "the host cuts what it sends by experts' ranks"),
    ("offload.py", "finish", "the state is back in host memory before it is used again"),
    ("state.py", "save", "a checkpoint is of what the step left"),
    ("state.py", "load", "what was read is there before it is used"),
    ("metrics.py", "<dictcomp>", "a script asks for numbers"),
    ("portions.py", "moved", _BATCH),
)
"""(file, function, reason) of waits that are meant."""


def reason_of(frames: Sequence[tuple[str, int, str]]) -> str:
    """Why a wait at ``frames``, innermost first, is meant; else nothing."""
    for file, _, function in frames[:1]:
        for known, inside, reason in MEANT:
            if Path(file).name == known and function == inside:
                return reason
    return ""


def frames_here(program: str, depth: int = 60) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first, of ``program``, a plan's folder, the user's files
    and autopar's runtime; torch's and the rehearsal's own are left out."""
    made: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(made) < depth:
        code: Any = frame.f_code
        file = code.co_filename
        if is_ours(file, program):
            made.append((file, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return made


def is_ours(file: str, program: str) -> bool:
    """Whether a line of ``file`` is one to show, see `frames_here`."""
    if file.startswith(_OWN) or file.startswith("<"):
        return False
    library = "site-packages" in file or f"{sys.base_prefix}/lib/python" in file
    return file.startswith((program, _RUNTIME)) or not library


def place_of(frames: Sequence[tuple[str, int, str]]) -> str:
    """``file:line in function`` of the innermost; behind it the line of the program that led to
    it."""
    if not frames:
        return "no line of yours"
    file, line, function = frames[0]
    text = f"{file}:{line} in {function}"
    outer = next((f for f in frames if Path(f[0]).parent.name == "program"), None)
    if outer is not None and outer[0] != file:
        text += f", from {outer[0]}:{outer[1]} in {outer[2]}"
    return text
