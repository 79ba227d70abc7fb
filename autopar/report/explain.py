"""Why a plan is as it is, as tables and as data: what ops do and move, and what else was close."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.report.explained import Alternative, Explained, StateMoved
from autopar.report.implementations import objects, words
from autopar.report.render import indented, table
from autopar.report.revisit import Forbidden
from autopar.report.units import duration, percent, size

_STRATEGY = (
    "strategy: the letter that each mesh axis splits; D or P: none, but gradients or results stay "
    "partial sums; whole: every rank does all"
)
_MARKS = {"+": "summed over", "!": "never split", "~": "in pieces of unequal size too"}


def explain(
    rows: Sequence[Explained],
    alternatives: Mapping[str, Sequence[Alternative]],
    step_time_s: float,
    state: Sequence[StateMoved] = (),
    forbidden: Sequence[Forbidden] = (),
    ranks: int = 1,
) -> list[RenderableType]:
    """Tables by block: one line an op with what it moves and what else was close.

    Ops that neither compute nor move anything (views) are left out. ``ranks``: of the pipeline,
    which the ops are spread over.
    """
    parts: list[RenderableType] = []
    whole_s = ranks * step_time_s
    for block, members in _by_block(rows).items():
        parts += _block(block, members, alternatives, whole_s)
    parts += _state(state) if state else []
    parts += _letters(rows)
    shown = (row for row in rows if row.compute_s or row.moved)
    if lines_of := dict.fromkeys(w for row in shown for w in words(row.kind, row.implementations)):
        parts += [Text(), Text("What each rank does beside the plain call", style="bold")]
        parts += [*(indented(Text(line)) for line in lines_of), Text()]
    if ranks > 1:
        parts.append(Text(f"of it: of the step of all {ranks} pipeline ranks together"))
    if alternatives:
        parts.append(Text("instead: the closest other split; all other ops chosen anew for it"))
    for rule in forbidden:
        if rule.extra_s < 0:
            parts.append(Text(f"Not allowed, though {duration(-rule.extra_s)} less: {rule.rule}."))
    return parts


def _block(
    block: str,
    members: Sequence[Explained],
    alternatives: Mapping[str, Sequence[Alternative]],
    whole_s: float,
) -> list[RenderableType]:
    """``whole_s``: a step, of all ranks of a pipeline together."""
    busy = sum(row.compute_s for row in members)
    moving = sum(row.communication_s for row in members)
    title = f"{block or 'outside the blocks'}: compute {duration(busy)}"
    title += f", collectives {duration(moving)} a step"
    columns = ("op", "strategy", "a step", "of it", "moves", "instead")
    objections = any(other.objection for row in members for other in alternatives.get(row.key, ()))
    whole = ("moves",) if objections else ("moves", "instead")  # an objection may wrap
    lines = table(*columns, right=("a step", "of it"), unbroken=whole)
    for row in members:
        time_s = row.compute_s + row.communication_s
        if time_s or row.moved:
            lines.add_row(
                row.key.removeprefix(f"{block}::"),
                row.way,
                duration(time_s),
                percent(time_s / whole_s) if whole_s else "",
                "\n".join(str(move) for move in row.moved),
                _closest(alternatives.get(row.key, ())),
            )
    return [Text(title, style="bold"), indented(lines), Text()]


def _state(state: Sequence[StateMoved]) -> list[RenderableType]:
    numbers = ("times", "bytes a step")
    lines = table("model state", "moved by", *numbers, right=numbers)
    for one in state:
        moved_by = f"{one.kind}({one.axis})"
        lines.add_row(one.what, moved_by, str(one.count), size(one.size_bytes))
    return [indented(lines), Text()]


def _letters(rows: Sequence[Explained]) -> list[RenderableType]:
    """The rules that the letters of strategies are from."""
    rules = {f"{row.kind}: {row.rule}": None for row in rows if row.rule and row.compute_s}
    if not rules:
        return []
    parts: list[RenderableType] = [
        Text("What the letters stand for: operands -> results, dim by dim", style="bold")
    ]
    marks = {word: mark for mark, word in _MARKS.items() if any(mark in r for r in rules)}
    legend = [f"{mark} {word}" for word, mark in marks.items()]
    parts += [indented(Text(f"({'; '.join(legend)})"))] if legend else []
    parts += [*(indented(Text(rule)) for rule in rules), Text()]
    return [*parts, Text(_STRATEGY)]


def explain_object(
    rows: Sequence[Explained],
    alternatives: Mapping[str, Sequence[Alternative]],
    state: Sequence[StateMoved] = (),
    forbidden: Sequence[Forbidden] = (),
) -> dict[str, Any]:
    """What ``autopar explain --json`` prints."""
    return {
        "ops": [
            {
                "key": row.key,
                "kind": row.kind,
                "source": row.source,
                "rule": row.rule,
                "strategy": row.strategy,
                "recipe": row.recipe or None,
                "implementations": objects(row.implementations),
                "compute_s": row.compute_s,
                "collectives": [
                    {
                        "direction": move.direction,
                        "kind": move.collective.kind,
                        "axis": move.collective.axis,
                        "size_bytes": move.collective.size_bytes,
                        "count": move.count,
                        "time_s": move.time_s,
                    }
                    for move in row.moved
                ],
                "alternatives": [
                    {
                        "strategy": other.strategy,
                        "extra_s": other.extra_s,
                        "objection": other.objection,
                    }
                    for other in alternatives.get(row.key, ())
                ],
            }
            for row in rows
        ],
        "state": [asdict(one) for one in state],
        "forbidden": [asdict(rule) for rule in forbidden],
    }


def _by_block(rows: Sequence[Explained]) -> dict[str, list[Explained]]:
    blocks: dict[str, list[Explained]] = defaultdict(list)
    for row in rows:
        block, inside, _ = row.key.partition("::")
        blocks[block if inside else ""].append(row)
    return blocks


def _closest(others: Sequence[Alternative]) -> str:
    """The cheapest other split; a strategy that only defers a sum says little to a reader."""
    splits = [o for o in others if not o.strategy.endswith((":D", ":P")) and o.strategy != "whole"]
    for other in (*splits, *others):
        return str(other)
    return ""
