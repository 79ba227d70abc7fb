"""Where a command's output goes: results to stdout, what jobs print beside them to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(parts: Iterable[RenderableType], data: dict[str, Any], json: bool) -> None:
    """``parts`` for a person, or ``data`` as one JSON object."""
    if json:
        import json as text

        print(text.dumps(data))
        return
    from autopar.report import render

    render.show(parts)


@contextmanager
def results_only(json: bool) -> Iterator[None]:
    """With ``--json``, what the processes of a job print goes to stderr."""
    if not json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
