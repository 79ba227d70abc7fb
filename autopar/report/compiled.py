"""What a compiler made of a plan's step, beside what the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.lowering.collectives import Row
from autopar.nouns.prediction import Memory
from autopar.report.render import indented, table
from autopar.report.units import duration, percent, size
from autopar.runtime.ahead.compile_job import Compiled

_TIES = 0.0005
"""Shares of bytes that are told apart no further."""
_PADDED = 0.1
"""By how much an all-reduce may have more bytes than what it stands for, padded to whole tiles."""


def compiled_parts(
    made: Compiled, memory: Memory, priced: Sequence[Mapping[str, Any]]
) -> list[RenderableType]:
    """Tables of memory on one device and of the collectives of a step.

    priced: rows of ``collectives.json``.
    """
    title = f"Compiled ahead for {made.target} by {made.compiler} in {duration(made.time_s)}"
    parts: list[RenderableType] = [Text(title, style="bold"), indented(_memory(made, memory))]
    if made.unread:
        return [*parts, Text(f"Collectives are not known: {made.unread}."), Text()]
    parts += [Text(), indented(_collectives(made.collectives, priced)), Text()]
    if made.hosts_move:
        parts.append(
            Text(
                f"Between slices hosts pass {made.hosts_move} more messages, which are not counted "
                "here: of an axis that goes across slices, bytes are less than planned."
            )
        )
    return parts


def compiled_object(
    made: Compiled, memory: Memory, priced: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What `autopar plan --compile --json` has of it."""
    compiled, planned = _totals(made.collectives), _totals(Row(**row) for row in priced)
    return {
        "target": made.target,
        "compiler": made.compiler,
        "time_s": made.time_s,
        "memory_bytes": {
            "arguments": made.arguments,
            "temporaries": made.temporaries,
            "results": made.results,
            "total": made.total,
            "code": made.code,
            "planned": _arrays(memory),
        },
        "collectives": [
            {"kind": k, "axis": a, "compiled_bytes": compiled[k, a], "planned_bytes": planned[k, a]}
            for k, a in sorted(compiled | planned)
        ],
        "issued": [asdict(row) for row in made.collectives],
        "unread": made.unread or None,
        "messages_between_slices": made.hosts_move,
    }


def _arrays(memory: Memory) -> int:
    """What the plan says of arrays of the program: the compiler knows of no allocator's buffers."""
    return memory.allocated - memory.buffers


def _memory(made: Compiled, memory: Memory) -> RenderableType:
    lines = table("memory of one device", "compiled", "planned", right=("compiled", "planned"))
    held = memory.parameters + memory.optimizer
    lines.add_row("arguments: parameters, optimizer, batch", size(made.arguments), size(held))
    lines.add_row("temporaries", size(made.temporaries), "")
    lines.add_row("results in no argument's place", size(made.results), "")
    planned = _arrays(memory)
    off = f" ({'+' if planned >= made.total else ''}{percent(planned / made.total - 1)})"
    lines.add_row("total", size(made.total), size(planned) + off)
    lines.add_row("the program itself", size(made.code), "")
    lines.add_row("limit", size(memory.limit), "")
    return lines


def _collectives(rows: Iterable[Row], priced: Sequence[Mapping[str, Any]]) -> RenderableType:
    rows = list(rows)
    compiled, planned = _totals(rows), _totals(Row(**row) for row in priced)
    times: Counter[tuple[str, str]] = Counter()
    for row in rows:
        times[row.kind, row.axis] += row.count
    numbers = ("times", "compiled", "planned")
    lines = table("collective", "axis", *numbers, "", right=numbers)
    for kind, axis in sorted(compiled | planned):
        moved, wanted = compiled[kind, axis], planned[kind, axis]
        same = abs(moved - wanted) <= _TIES * max(moved, wanted)
        word = "" if same else _other(kind, axis, moved, wanted, compiled, planned)
        lines.add_row(kind, axis, str(times[kind, axis]), size(moved), size(wanted), word)
    return lines


def _other(
    kind: str,
    axis: str,
    moved: int,
    wanted: int,
    compiled: Mapping[tuple[str, str], int],
    planned: Mapping[tuple[str, str], int],
) -> str:
    """Why bytes differ, where another line says it."""
    scattered, summed = ("reduce_scatter", axis), ("all_reduce", axis)
    missing = planned.get(scattered, 0) - compiled.get(scattered, 0)
    more = compiled.get(summed, 0) - planned.get(summed, 0)
    if kind in ("reduce_scatter", "all_reduce") and 0 <= more - missing <= _PADDED * missing:
        return "an all-reduce and a slice" if kind == "reduce_scatter" else "of reduce-scatters"
    return "more than planned" if moved > wanted else "less than planned"


def _totals(rows: Iterable[Row]) -> Counter[tuple[str, str]]:
    """Bytes of a step by kind and axis; rows without bytes are left out."""
    totals: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.size_bytes:
            totals[row.kind, row.axis] += row.size_bytes * row.count
    return totals
