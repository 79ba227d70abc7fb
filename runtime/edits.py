"""How the program in a plan folder differs from the one that its plan gives, line by line."""

from __future__ import annotations

import difflib
from pathlib import Path

from autopar import plan_folder

NAMED = 3
"""How many places are told before "and N more"."""


def told(folder: str | Path, given: str) -> str:
    """One sentence on what sets the folder's program apart from ``given``, the plan's own text.

    Empty where nothing does but comments and empty lines.
    """
    file = Path(folder) / plan_folder.PROGRAM / "model.py"
    found = edits(file.read_text(), given)
    if not found:
        return ""
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return (
        f"{file} is not the program of its plan.json, one of the two was edited: "
        f"{'; '.join(found[:NAMED])}{more}. Put that back, or plan the model again"
    )


def edits(program: str, given: str) -> list[str]:
    """Every place where ``program`` is not ``given``: its line, and what each of them says."""
    ours, theirs = _code(program), _code(given)
    matcher = difflib.SequenceMatcher(
        None, [text for _, text in theirs], [text for _, text in ours], autojunk=False
    )
    found = []
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        line = ours[j][0] if j < len(ours) else len(program.splitlines()) + 1
        right = _shown([text for _, text in theirs[i:i_end]])
        wrong = _shown([text for _, text in ours[j:j_end]])
        if tag == "delete":
            found.append(f"before line {line}, {right} is missing")
        elif tag == "insert":
            found.append(f"line {line}, {wrong}, is not the plan's")
        else:
            found.append(f"line {line} is {wrong}, the plan gives {right}")
    return found


def _code(text: str) -> list[tuple[int, str]]:
    """(number, text) of every line that is not empty or a comment, without its comment."""
    lines = [(n, line.partition("  # ")[0].rstrip()) for n, line in enumerate(text.splitlines(), 1)]
    return [(n, line) for n, line in lines if line and not line.lstrip().startswith("#")]


def _shown(lines: list[str]) -> str:
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"`{lines[0].strip()}`{more}" if lines else ""
