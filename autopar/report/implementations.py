"""How ops run that an axis splits otherwise than their plain calls can be, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.rules.implementations.table import TABLE

Running = Mapping[str, tuple[str, ...]]
"""By name the implementations that an op runs by, and the axes that ask for each."""


def words(kind: str, running: Running) -> list[str]:
    """A line for each."""
    return [
        f"{kind} over {' and '.join(axes)}: {TABLE[name].runs} ({name})"
        for name, axes in running.items()
    ]


def objects(running: Running) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {"name": name, "axes": list(axes), "runs": TABLE[name].runs}
        for name, axes in running.items()
    ]
