"""What libraries warn of in a job: each text once, from rank 0.

All ranks run the same program, so they all get the same warnings. Those of the user's own files are
left alone: they may be about one rank's data.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import warnings
from typing import Any, TextIO

LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib", "stdlib"))


def once_from_rank_0(rank: int) -> None:
    """For the rest of this process. Before libraries are imported that log at once."""
    show = warnings.showwarning
    shown: set[str] = set()

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> Any:
        if filename.startswith(LIBRARIES):
            if rank or str(message) in shown:
                return
            shown.add(str(message))
        show(message, category, filename, lineno, file, line)

    warnings.showwarning = showwarning
    if rank:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        logging.getLogger("torch").setLevel(logging.ERROR)
