"""What the person who waits sees."""

from __future__ import annotations

import sys


def progress(message: str) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)
