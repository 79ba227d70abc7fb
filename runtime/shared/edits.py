"""How the program in a plan folder differs from the one that its plan gives, line by line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopar.emit.code_lines import code_lines, matcher
from autopar.files import plan_folder
from autopar.frontends.shared.captured import Captured
from autopar.lowering.of_plan import lowered_plan, planned_graph
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.runtime.shared.error_places import LONGEST, place

NAMED = 3
"""How many places are told before "and N more"."""


class EditedProgram(UserError):
    """A program that is not the one that its plan gives."""


def raise_edited(error: Exception, changed: str) -> None:
    """Raises `EditedProgram` if ``error`` is that of a program that was ``changed``."""
    if not changed:
        return
    at = f" at {place(error)}" if place(error) else ""
    message = f"{type(error).__name__}: {error}"
    message = message if len(message) <= LONGEST else f"{message[:LONGEST]} ..."
    raise EditedProgram(f"the program fails{at} ({message}). {changed}") from error


def program_of(plan: Plan, captured: Captured, probes: bool = False, marks: bool = False) -> str:
    """``model.py`` of `files_of`."""
    return files_of(plan, captured, probes, marks)[plan_folder.MODEL]


def files_of(
    plan: Plan, captured: Captured, probes: bool = False, marks: bool = False
) -> dict[str, str]:
    """The program that ``plan`` gives, by file. Raises what lowering and emitting raise.

    probes: every result through a probe, one op a line (JAX: marked, one op a line).
    marks:  as `autopar.emit.marks` says.
    """
    graph = planned_graph(plan, captured.graph)
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    lowered = lowered_plan(plan, graph, dims)
    if plan.framework == "jax":
        from autopar.emit.jax import emit as emit_jax

        return emit_jax(lowered, plan, captured, probes=probes, marks=marks)
    from autopar.emit.pytorch import emit

    return emit(lowered, plan, captured, probes=probes, marks=marks)


def known_edits(folder: str | Path, plan: Plan, capture: Callable[[], Captured]) -> str:
    """`edits_of`, or nothing where it raises: there is something else to say then."""
    try:
        return edits_of(folder, plan, capture())
    except Exception:  # of a model that cannot be captured now, say
        return ""


def edits_of(folder: str | Path, plan: Plan, captured: Captured) -> str:
    """One sentence on what sets the folder's program apart from the one that ``plan`` gives.

    Empty where nothing does but comments, docstrings and empty lines. Raises as `program_of`.
    """
    for name, given in files_of(plan, captured).items():
        file = Path(folder) / plan_folder.PROGRAM / name
        if not file.is_file():
            return f"{file} is missing. Put it back, or plan the model again"
        changes = edits(file.read_text(), given, python=file.suffix == ".py")
        if changes:
            more = f"; and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
            return (
                f"{file} is not the program of its plan.json, one of the two was edited: "
                f"{'; '.join(changes[:NAMED])}{more}. Put that back, or plan the model again"
            )
    return ""


def edits(program: str, given: str, python: bool = True) -> list[str]:
    """Every place where ``program`` is not ``given``: its line, and what each of them says."""
    ours, theirs = code_lines(program, python), code_lines(given, python)
    changes = []
    for tag, i, i_end, j, j_end in matcher(theirs, ours).get_opcodes():
        if tag == "equal":
            continue
        line = ours[j][0] if j < len(ours) else len(program.splitlines()) + 1
        right = _shown([text for _, text in theirs[i:i_end]])
        wrong = _shown([text for _, text in ours[j:j_end]])
        if tag == "delete":
            changes.append(f"before line {line}, {right} is missing")
        elif tag == "insert":
            changes.append(f"line {line}, {wrong}, is not the plan's")
        else:
            changes.append(f"line {line} is {wrong}, the plan gives {right}")
    return changes


def _shown(lines: list[str]) -> str:
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"`{lines[0].strip()}`{more}" if lines else ""
