"""How the program in a plan folder differs from the one that its plan gives, line by line."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

from autopar import plan_folder
from autopar.frontends.captured import Captured
from autopar.lowering import lower
from autopar.nouns.plan import Plan
from autopar.precision import at_precision
from autopar.rules.batch import data_choices
from autopar.rules.kept_whole import keep_whole

NAMED = 3
"""How many places are told before "and N more"."""


def program_of(plan: Plan, captured: Captured, probes: bool = False) -> str:
    """The text that ``plan`` gives. Raises what lowering and emitting raise."""
    graph = at_precision(keep_whole(captured.graph, plan.replicated_ops), plan.precision)
    dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    choices = data_choices(graph, dims)
    lowered = lower(graph, plan.stages[0], plan.microbatches, choices, dims)
    name = plan_folder.CODE[plan.framework]
    if plan.framework == "jax":
        from autopar.runtime.emit_jax import emit as emit_jax

        return emit_jax(lowered, plan, captured)[name]
    from autopar.runtime.emit_torch import emit

    return emit(lowered, plan, captured, probes=probes)[name]


def told(folder: str | Path, plan: Plan, captured: Captured) -> str:
    """One sentence on what sets the folder's program apart from the one that ``plan`` gives.

    Empty where nothing does but comments, docstrings and empty lines. Raises as `program_of`.
    """
    file = Path(folder) / plan_folder.PROGRAM / plan_folder.CODE[plan.framework]
    found = edits(file.read_text(), program_of(plan, captured))
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
    found = []
    for tag, i, i_end, j, j_end in _matcher(theirs, ours).get_opcodes():
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


def transplanted(program: str, given: str, probed: str) -> str | None:
    """``probed`` with the edits that make ``given`` into ``program``.

    ``probed`` says the same as ``given`` in more statements, so that an edit may be of a line that
    it does not have: None then. Collectives are lines of their own in both.
    """
    ours, base, more = _code(program), _code(given), _code(probed)
    lines = probed.splitlines()
    place = {  # of a line of ``given`` in ``lines``
        i + k: more[j + k][0] - 1
        for i, j, size in _matcher(base, more).get_matching_blocks()
        for k in range(size)
    }
    for tag, i, i_end, j, j_end in reversed(_matcher(base, ours).get_opcodes()):
        if tag == "equal":
            continue
        if i == i_end and i - 1 in place:
            at = place[i - 1] + 1
        elif i in place:
            at = place[i]
        else:
            return None
        if any(k not in place for k in range(i, i_end)):
            return None
        for k in reversed(range(i, i_end)):
            del lines[place[k]]
        lines[at:at] = [text for _, text in ours[j:j_end]]
    return "\n".join(lines) + "\n"


def _matcher(a: list[tuple[int, str]], b: list[tuple[int, str]]) -> difflib.SequenceMatcher[str]:
    left, right = ([text for _, text in lines] for lines in (a, b))
    return difflib.SequenceMatcher(None, left, right, autojunk=False)


def _code(text: str) -> list[tuple[int, str]]:
    """(number, text) of every line but comments and docstrings, without the comment beside it."""
    said = {line for start, end in _docstrings(text) for line in range(start, end + 1)}
    lines = [(n, line.partition("  # ")[0].rstrip()) for n, line in enumerate(text.splitlines(), 1)]
    return [
        (n, line)
        for n, line in lines
        if line and n not in said and not line.lstrip().startswith("#")
    ]


def _docstrings(text: str) -> Iterator[tuple[int, int]]:
    """First and last line of each string that is a statement of its own."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, node.end_lineno or node.lineno


def _shown(lines: list[str]) -> str:
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"`{lines[0].strip()}`{more}" if lines else ""
