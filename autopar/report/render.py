"""Rich tables as text: on a terminal, into a pipe, or into ``report.txt``."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Literal

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


def table(*columns: str, right: Iterable[str] = (), unbroken: Iterable[str] = ()) -> Table:
    """A table without frames. Columns in ``right`` hold numbers, ``unbroken`` ones never wrap."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    numbers, whole = set(right), {*right, *unbroken}
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=name in whole)
    return made


def indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))
