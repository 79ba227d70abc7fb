"""A folder of checkpoints, one for each step that was saved, of which the newest are kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from autopar.runtime.checkpoint_folder import MANIFEST

NAME = re.compile(r"step-(\d+)")


def of_step(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step-{step}"


def kept(folder: str | Path) -> list[Path]:
    """Whole checkpoints in ``folder``, oldest first; what is half written has other names."""
    try:
        there = [p for p in Path(folder).iterdir() if NAME.fullmatch(p.name)]
    except OSError:
        return []
    whole = [path for path in there if (path / MANIFEST).is_file()]
    return sorted(whole, key=lambda path: int(path.name.partition("-")[2]))


def drop_old(folder: str | Path, keep: int) -> None:
    """Removes all but the newest ``keep``; a name without a manifest counts for nothing."""
    for path in kept(folder)[: -keep or None]:
        (path / MANIFEST).unlink(missing_ok=True)  # from here on it is no checkpoint
        shutil.rmtree(path, ignore_errors=True)


def newest(folder: str | Path) -> Path:
    """``folder``, or the newest checkpoint in it where it is a folder of them."""
    whole = kept(folder)
    return Path(folder) if not whole or (Path(folder) / MANIFEST).is_file() else whole[-1]
