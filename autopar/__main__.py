"""``autopar`` as a process of its own, which ends with the command."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress

from autopar.cli.app import main

SELDOM = (100_000, 20, 100)
"""Allocations, then collections of the generation before, until garbage is looked for again."""


def command() -> None:
    """Runs `autopar.cli.app.main` and exits.

    Nearly all that a command imports and captures lives until the end: Python is told to look for
    garbage seldom, and not to take everything apart before it exits.
    """
    gc.set_threshold(*SELDOM)
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # whoever read it has had enough
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
