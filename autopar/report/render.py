"""Rich tables as text: on a terminal, into a pipe, or into ``report.txt``."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table

WIDTH = 120


def show(parts: Iterable[RenderableType], width: int = WIDTH) -> None:
    """Prints to standard output, ``width`` columns wide where that is no terminal."""
    parts = list(parts)
    out = Console(highlight=False)
    if not out.is_terminal:
        sys.stdout.write(to_text(parts, width))
        return
    for part in parts:
        out.print(part)


def to_text(parts: Iterable[RenderableType], width: int = WIDTH) -> str:
    """The parts as plain text, ``width`` columns wide."""
    buffer = io.StringIO()
    plain = Console(file=buffer, width=width, highlight=False, color_system=None)
    for part in parts:
        plain.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without frames; the columns named in ``right`` hold numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    numbers = set(right)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))
